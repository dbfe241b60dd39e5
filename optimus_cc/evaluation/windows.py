"""Which tokens the model sees, and which it has to predict, for a text that may be longer than its window. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Tokens = Sequence[int]


@dataclass(frozen=True)
class Part:
    """One row for the model: the log-probabilities of the last ``len(targets)`` of its predictions are wanted."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    """At most as many as inputs; the last one is the token that follows the last input."""


def continuation(context: Tokens, target: Tokens, window: int) -> list[Part]:
    """What has to be predicted to know how likely ``target`` is after ``context``.

    A context that is too long loses its beginning. A target that does not fit into the window by itself is predicted
    in several parts, as :func:`rolling` does after the context's last token.

    Args:
        context: at least one token.
        target: at least one token.
        window: the most inputs that the model takes.
    """
    if not context or not target:
        raise ValueError(f"a context and a continuation of at least one token each, not {len(context)}, {len(target)}")
    if len(target) > window:
        return list(rolling(target, context[-1], window))
    seen = (*context, *target)[-(window + 1) :]
    return [Part(seen[:-1], tuple(target))]


def rolling(tokens: Tokens, prefix: int, window: int) -> Iterator[Part]:
    """Every token of a document exactly once, each after as many as fit: ``loglikelihood_rolling`` of lm-eval.

    Args:
        tokens: of one document; nothing comes of none.
        prefix: the token that the first one is predicted from.
        window: the most inputs that the model takes.
    """
    before = (prefix, *tokens)
    for start in range(0, len(tokens), window):
        end = min(start + window, len(tokens))
        # The last part is as long as the others, so what it predicts has as much before it as there is.
        yield Part(before[max(0, end - window) : end], tuple(tokens[start:end]))
