"""Fixtures of the whole test suite."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Gloo ranks on demand; what they import is imported once in a session."""
    return RankPool()
