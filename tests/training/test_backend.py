"""Where ranks find each other."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from optimus_cc.training.backend import meeting_place

TIMEOUT = timedelta(seconds=5)


@pytest.mark.parametrize("name", ["x#1", "x?rank=3", "x%23y", "x y", "x;y&z", "ü", os.fsdecode(b"x\xff")])
def test_a_file_is_where_its_path_says(tmp_path: Path, name: str) -> None:
    """Whatever is in it; so two runs in folders whose names begin alike never meet."""
    for folder in (tmp_path / name, tmp_path / f"{name}2"):
        folder.mkdir()
        place = meeting_place(f"file://{folder}/rendezvous", 1, TIMEOUT)
        assert place.keys() == {"store"}
        assert not place["store"].check(["rank"]), "nobody was here before"
        place["store"].set("rank", str(folder.stat().st_ino))
        assert os.listdir(folder) == ["rendezvous"]
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}2"}


def test_other_ways_are_torchs(tmp_path: Path) -> None:
    for rendezvous in ("env://", "tcp://n1:1234"):
        assert meeting_place(rendezvous, 2, TIMEOUT) == {"init_method": rendezvous}
