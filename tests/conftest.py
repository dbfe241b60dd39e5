"""Fixtures of the whole test suite."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Gloo ranks on demand; what they import is imported once in a session."""
    return RankPool()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kill-seeds",
        type=_numbers,
        default=range(2),
        metavar="FIRST-LAST",
        help="seeds of the random kills in the tests of resuming (default: 0-1)",
    )


def _numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
