"""Fixtures of the whole test suite."""

from __future__ import annotations

from collections import Counter

import pytest

from optimus_cc.process import let_threads_sleep
from tests.ranks import RankPool

let_threads_sleep()  # nothing has loaded torch yet


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Gloo ranks on demand; what they import is imported once in a session."""
    return RankPool()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kill-seeds",
        type=_numbers,
        default=range(1, 2),
        metavar="FIRST-LAST",
        help="seeds of the random kills in the tests of resuming (default: 1-1)",
    )
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of each test's parameters only the first and every N-th after it (default: 1, all)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("--every")
    seen: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (left_out if seen[name] % every else kept).append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
