"""A few chains of ``make soak``, and what holds a chain to its undisturbed run, on runs changed by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers.processes.preloaded import Parents
from optimus_cc import checkpoints
from optimus_cc.runs import RunFolder
from tests.soak.chains import Attempt, Broken, Chain, hold, random_config, run_chain
from tests.soak.damage import small_disk


@pytest.fixture(scope="module")
def parents() -> Iterator[Parents]:
    with Parents() as parents:
        yield parents


@pytest.mark.parametrize("seed", [11, 12])
def test_a_chain_ends_as_the_undisturbed_run(seed: int, parents: Parents, tmp_path: Path) -> None:
    with small_disk(48, tmp_path / "disk") as disk:
        run_chain(seed, parents, tmp_path, disk)


@pytest.fixture
def pair(parents: Parents, tmp_path: Path) -> tuple[Chain, RunFolder, RunFolder]:
    """One training, done twice."""
    config = random_config(random.Random(1), tmp_path, layouts=("pp2",))
    folders = []
    for name in ("whole", "parts"):
        mapping: dict[str, Any] = {**config.to_mapping(), "runs_dir": str(tmp_path / name)}
        from optimus_cc.config import load

        attempt = Attempt(load(mapping), parents)
        attempt.wait()
        assert attempt.code == 0, attempt.output
        folders.append(attempt.folder)
    return Chain(1, config, parents), folders[0], folders[1]


def test_a_difference_is_found(pair: tuple[Chain, RunFolder, RunFolder]) -> None:
    chain, whole, parts = pair
    hold(chain, whole, parts)

    lines = parts.metrics_path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records[1]["loss"] += 1e-12
    parts.metrics_path.write_text("\n".join(map(json.dumps, records)) + "\n")
    with pytest.raises(Broken, match="records differ"):
        hold(chain, whole, parts)
    parts.metrics_path.write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(Broken, match="1 of"):
        hold(chain, whole, parts)
    parts.metrics_path.write_text("\n".join(lines) + "\n")

    last = checkpoints.all_in(parts.checkpoints)[0].path
    for name in ("__0_0.distcp", "rank_1.pt"):
        before = (last / name).read_bytes()
        (last / name).write_bytes((checkpoints.all_in(whole.checkpoints)[1].path / name).read_bytes())
        with pytest.raises(Broken, match=name):
            hold(chain, whole, parts)
        (last / name).write_bytes(before)
    hold(chain, whole, parts)
