"""Fixtures of the whole test suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks that stay alive over the session."""
    pool = RankPool()
    yield pool
    pool.close()
