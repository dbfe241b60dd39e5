"""Run folders as a training leaves them, without a training: real configurations, made-up results."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from optimus_cc.config import RunConfig
from optimus_cc.records import replace_file, to_json
from optimus_cc.runs import RunFolder, Status
from tests.config.command_line import one

CLASSES = ("pipeline_forward", "pipeline_backward", "data_parallel", "embedding")
ON = "training.steps=40 training.probes.memory=true training.probes.phases=true"


@cache
def config_of(line: str) -> RunConfig:
    return one(line)


def with_seed(line: str, seed: int) -> RunConfig:
    config: Any = config_of(line)
    seeded: RunConfig = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=seed))
    return seeded


def write_run(
    runs: Path,
    line: str = "technique=baseline parallel=pp4_dp2",
    seed: int = 1,
    *,
    perplexity: float = 100.0,
    step_time_s: float = 0.5,
    wire: dict[str, float] | None = None,
    state: Any = "finished",
    probes: bool = False,
) -> RunFolder:
    """A run of what ``python run.py LINE`` composes; traffic is 1 MB in each class, or what ``wire`` says."""
    config = with_seed(f"{line} {ON if probes else 'training.steps=40'}", seed)
    folder = RunFolder(runs / config.run_id)
    folder.path.mkdir(parents=True)
    folder.config_path.write_text(yaml.safe_dump(config.to_mapping(), sort_keys=False))
    origin = {"run_id": config.run_id, "scientific": config.scientific(), "git": {"commit": "c0ffee"}, "host": "here"}
    replace_file(folder.provenance_path, to_json({**origin, "created": "2024-01-01", "command": f"run.py {line}"}))
    folder.write_status(Status(state, step=40, total_steps=40, started="2024-01-01", device="cpu"))
    if state != "finished":
        return folder
    sent = dict.fromkeys(CLASSES, 1000000.0) | (wire or {})
    folder.write_summary(
        {
            "run_id": config.run_id,
            "steps": 40,
            "parameters": 1_000_000,
            "train": {"loss": 4.0, "perplexity": 54.6},
            "validation": {"loss": 4.6, "perplexity": perplexity, "tokens": 1000},
            "step_time_s": {"mean": step_time_s, "median": step_time_s, "p95": step_time_s},
            "tokens_per_s": 2048 / step_time_s,
            "traffic": {
                name: {"logical_bytes_per_step": 1e6, "wire_bytes_per_step": count} for name, count in sent.items()
            },
            "wall_s": 30.0,
        }
    )
    for step in (10, 20, 30, 40):
        folder.append_metrics({"kind": "train", "step": step, "loss": 7 - step / 20, "step_time_s": step_time_s})
        folder.append_metrics({"kind": "validation", "step": step, "loss": 4.6, "perplexity": perplexity + 40 - step})
        if probes:
            for record in _probes(config, step):
                folder.append_metrics({"kind": "probe", "step": step, **record})
    return folder


def _probes(config: RunConfig, step: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for rank in range(8):
        place = {"rank": rank, "stage": rank // 2, "data_parallel_rank": rank % 2, "tensor_parallel_rank": 0}
        times = {"forward": 0.3, "backward": 0.4, "inter_stage": 0.2, "other": 0.1}
        records.append({"probe": "phases", **place, "step_time_s": 0.5, "fraction_of_step": times})
        parts = {"weights": 20, "gradients": 20, "optimizer_state": 40, "activations": 20}
        extra = {"workspaces": 6, "residuals": 1} if config.technique.cb.enabled else {"workspaces": 0, "residuals": 0}
        sizes = {**parts, **extra, "baseline": 100, "peak": 100 + sum(extra.values()), "resident_peak": 1000}
        records.append({"probe": "memory", **place, **{f"{name}_bytes": size for name, size in sizes.items()}})
    if config.technique.cb.enabled:
        values = {"cosine_similarity": 0.01 * (-1) ** (step // 10), "residual_mean": 1e-6, "residual_rms": 1e-3}
        records.append({"probe": "error_independence", "boundary": 0, "microbatch": 1, **values})
    return records
