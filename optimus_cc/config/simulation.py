"""``simulation``: how ``task=simulate`` predicts, and what ``task=calibrate`` fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from optimus_cc.config.cluster import ClusterConfig
from optimus_cc.config.errors import Problem
from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.config.schema import MAX_NAME, NAME, PathText, PositiveInt, strict


@strict
class SimulationConfig:
    bandwidth: Literal["effective", "line_rate"] = "effective"
    """Price messages at what links were seen to give, or at what their hardware could. The other one is printed too."""
    ignore_memory: bool = False
    """Predict a layout though it doesn't fit into the devices' memory."""
    fully_sharded: bool = False
    """Price data parallelism as if weights were sharded too (FSDP, ZeRO-3), which training here can't do: each layer's
    are gathered for its forward and for its backward pass, and its gradients scattered, behind computation."""
    trace: PathText | None = None
    """A file for the predicted step, which Perfetto and chrome://tracing open; null: none."""
    gantt: PathText | None = None
    """A file for the same as a figure, .pdf or .png; null: none."""
    measured: PathText | None = None
    """For task=calibrate: a CSV file of measured step times."""
    collectives: PathText | None = None
    """For task=calibrate: a folder with gpus_N.csv, times of all-reduces inside a node; null: what the cluster says."""
    cluster_file: PathText | None = None
    """For task=calibrate: where the fitted cluster goes, NAME.yaml; null: nowhere."""
    folds: PositiveInt = 5
    """For task=calibrate: in how many parts measurements are cut for cross-validation."""
    gradient_bytes: Literal[2, 4] = 4
    """For task=calibrate: of one gradient's element in the measured runs."""

    def problems(self, task: str, parallel: ParallelConfig, cluster: ClusterConfig) -> Iterator[Problem]:
        if task in ("simulate", "calibrate") and not cluster.device.known:
            yield Problem(
                "cluster.device",
                cluster.name,
                "a cluster whose devices' rates are known (cluster.device.*)",
                "cluster=a100_hdr200, or another one whose file says them",
            )
        if self.fully_sharded and (parallel.pipeline_parallel_size > 1 or not parallel.distributed_optimizer):
            yield Problem(
                "simulation.fully_sharded",
                True,
                "false with several stages or without parallel.distributed_optimizer",
                "parallel.pipeline_parallel_size=1 parallel.distributed_optimizer=true",
            )
        for key, suffixes, example in (("trace", (".json",), "trace.json"), ("gantt", (".pdf", ".png"), "gantt.pdf")):
            value = getattr(self, key)
            if value is None:
                continue
            path = Path(value)
            if path.suffix not in suffixes or not path.absolute().parent.is_dir():
                allowed = f"a {' or '.join(suffixes)} file in a folder that exists"
                yield Problem(f"simulation.{key}", value, allowed, f"simulation.{key}={example}")
            if task != "simulate":
                yield Problem(f"simulation.{key}", value, f"null with task={task}", "task=simulate")
        if task == "calibrate":
            yield from self._calibration_problems()

    def _calibration_problems(self) -> Iterator[Problem]:
        if self.measured is None or not Path(self.measured).is_file():
            yield Problem("simulation.measured", self.measured, "a CSV file of step times", "simulation.measured=FILE")
        if self.collectives is not None and not any(Path(self.collectives).glob("gpus_*.csv")):
            allowed = "a folder with gpus_N.csv, or null"
            yield Problem("simulation.collectives", self.collectives, allowed, "simulation.collectives=null")
        if self.cluster_file is not None:
            path = Path(self.cluster_file)
            named = re.fullmatch(NAME, path.stem) and len(path.stem) <= MAX_NAME
            if path.suffix != ".yaml" or not named or path.exists() or not path.absolute().parent.is_dir():
                allowed = (
                    "a new NAME.yaml in a folder that exists, whose NAME has letters, digits, _ and . alone: "
                    "none is overwritten"
                )
                yield Problem("simulation.cluster_file", self.cluster_file, allowed, "another name")
