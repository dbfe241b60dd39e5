"""How good a trained model is: zero-shot scores through lm-eval, and perplexities, at any layout."""
