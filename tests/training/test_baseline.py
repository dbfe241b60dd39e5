"""With nothing compressed, training is Megatron-core's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.configurations import LAYOUTS, tiny
from tests.ranks import RankPool
from tests.training_runs import train_ours, train_plain

CASES: dict[str, dict[str, Any]] = {
    "single": {},
    "tp2": {},
    "pp4": {},
    "dp2_distributed_optimizer": {"parallel": {"distributed_optimizer": True}},
    "tp2_pp2_dp2": {"parallel": {"overlap_grad_reduce": True}},
    "pp4_v2": {},
    "pp2_v2_overlap": {},
    "pp4_bf16": {"precision": "bf16"},
    "tp2_pp2_dp2_bf16": {"precision": "bf16", "parallel": {"distributed_optimizer": True}},
    "pp2_full": {"recompute": "full"},
    "pp2_selective": {"recompute": "selective"},
    "pp2_dropout": {"model": {"dropout": 0.1}},
}


@pytest.mark.megatron
@pytest.mark.parametrize("name", CASES)
def test_baseline_equals_plain_megatron(ranks: RankPool, name: str) -> None:
    layout = max((known for known in LAYOUTS if name.startswith(known)), key=len)
    config = tiny(layout, validation_interval=100, **CASES[name])
    ours = ranks.run(config.parallel.world_size, train_ours, config)
    plain = ranks.run(config.parallel.world_size, train_plain, config)
    for rank, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert a["weights"].keys() == b["weights"].keys()
        for key, value in b["weights"].items():
            assert torch.equal(a["weights"][key], value), f"rank {rank}: {key} differs"
    trained = [record for record in ours[0]["records"] if record["kind"] == "train"]
    assert [record["grad_norm"] for record in trained] == plain[0]["norms"]
    # Every last stage's micro-batch losses, meaned: what the records hold.
    last_stages = [result["losses"] for result in plain if result["losses"][0]]
    for step, record in enumerate(trained):
        means = [float(torch.tensor(losses[step]).mean()) for losses in last_stages]
        assert record["loss"] == pytest.approx(sum(means) / len(means), rel=1e-12)
    assert trained[-1]["loss"] < trained[0]["loss"]
