"""Errors that a run's inputs lead to."""

from __future__ import annotations


class DataError(ValueError):
    """A corpus or a tokenizer that can't be used. The message says where, what was expected, and what to do."""
