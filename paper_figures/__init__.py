"""Tidy tables and predictions to the paper's tables and figures, and the page that holds them."""
