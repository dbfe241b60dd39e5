"""Measured step times, from a CSV file, as configurations that can be predicted."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_cc.config.cluster import ClusterConfig
from optimus_cc.config.errors import ConfigError, Problem
from optimus_cc.config.run import RunConfig, load
from optimus_cc.config.tokenizer import GPT2_VOCABULARY_SIZE
from optimus_cc.files import open_regular_text

COLUMNS = (
    "gpus",
    "global_batch",
    "micro_batch",
    "hidden_size",
    "attention_heads",
    "layers",
    "sequence_length",
    "tensor_parallel",
    "data_parallel",
    "pipeline_parallel",
    "iteration_time_ms",
)
"""What a file of step times has at least. They are those of Megatron-LM or its kin: half precision, full
recomputation, 1F1B, messages shared out over tensor-parallel ranks, tied embeddings, GPT-2's vocabulary, dropout."""


_SAME = 1.1
"""By how much two measurements of the same run may differ."""


@dataclass(frozen=True)
class Sample:
    config: RunConfig
    seconds: float

    @property
    def place(self) -> float:
        """A number in [0, 1) that depends on what was run alone: whoever splits by it gets the same parts again."""
        parallel, model, training = self.config.parallel, self.config.model, self.config.training
        said = (model.num_layers, model.hidden_size, model.num_attention_heads, model.sequence_length, parallel.label)
        text = repr((*said, training.global_batch_size, training.micro_batch_size))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def read(path: str | Path, cluster: ClusterConfig) -> list[Sample]:
    """The step times of a file with :data:`COLUMNS`, as run on as many nodes of ``cluster`` as they need.

    Raises:
        ConfigError: columns are missing, a row makes no sense, or two rows say that the same run took very different
            times. Rows of the same run that agree are one sample, with their mean.
    """
    try:
        with open_regular_text(path, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            Problem("simulation.measured", str(path), f"a CSV file of step times, in UTF-8 ({error})", "mend it")
        ) from None
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise ConfigError(
            Problem("simulation.measured", str(path), f"a CSV file with {', '.join(missing)} and rows", "add them")
        )
    samples: dict[tuple[int, ...], list[tuple[int, Sample]]] = {}
    for number, row in enumerate(rows, start=2):
        try:
            values = {name: int(row[name]) for name in COLUMNS[:-1]}
            milliseconds = float(row[COLUMNS[-1]])
            if not 0 < milliseconds < math.inf:
                raise ValueError(f"iteration_time_ms is {milliseconds}")
            ranks = values["tensor_parallel"] * values["data_parallel"] * values["pipeline_parallel"]
            if ranks != values["gpus"]:
                raise ValueError(f"gpus is {values['gpus']}, but its layout has {ranks} ranks")
            sample = Sample(configuration(values, cluster), milliseconds / 1e3)
            samples.setdefault(tuple(values.values()), []).append((number, sample))
        except (ValueError, TypeError) as error:
            said = str(error).splitlines()[-1].strip()
            raise ConfigError(
                Problem("simulation.measured", f"{path}, line {number}", f"a row that can be run ({said})", "mend it")
            ) from None
    return [_mean(str(path), same) for same in samples.values()]


def _mean(path: str, same: Sequence[tuple[int, Sample]]) -> Sample:
    """One sample of all rows that ran the same, which would else be both fitted and held out."""
    least, most = (choose(same, key=lambda row: row[1].seconds) for choose in (min, max))
    if most[1].seconds > _SAME * least[1].seconds:
        raise ConfigError(
            Problem(
                "simulation.measured",
                f"{path}, lines {least[0]} and {most[0]}",
                f"one time for the same run, or times within {100 * (_SAME - 1):.0f} %: these are "
                f"{1e3 * least[1].seconds:g} and {1e3 * most[1].seconds:g} ms",
                "leave the wrong one out, or name what differs in the columns",
            )
        )
    return Sample(same[0][1].config, sum(sample.seconds for _, sample in same) / len(same))


def configuration(row: dict[str, int], cluster: ClusterConfig) -> RunConfig:
    """What a row of a file describes."""
    nodes = -(-row["gpus"] // cluster.ranks_per_node)
    mapping: dict[str, Any] = {
        "task": {"name": "exposure"},
        "model": {
            "name": "measured",
            "num_layers": row["layers"],
            "hidden_size": row["hidden_size"],
            "num_attention_heads": row["attention_heads"],
            "sequence_length": row["sequence_length"],
            "dropout": 0.1,
        },
        "parallel": {
            "tensor_parallel_size": row["tensor_parallel"],
            "pipeline_parallel_size": row["pipeline_parallel"],
            "data_parallel_size": row["data_parallel"],
            "split_over_tensor_parallel": row["tensor_parallel"] > 1,
        },
        "technique": {"name": "baseline"},
        "data": {"name": "wikipedia_sample"},
        "tokenizer": {"name": "bpe", "vocabulary_size": GPT2_VOCABULARY_SIZE},
        "optimizer": {"learning_rate": 1e-4},
        "training": {
            "steps": 1,
            "global_batch_size": row["global_batch"],
            "micro_batch_size": row["micro_batch"],
            "precision": "bf16",
            "recompute": "full",
        },
        "cluster": {"name": cluster.name, "num_nodes": nodes, "ranks_per_node": cluster.ranks_per_node},
    }
    return load(mapping)


def parts(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """``samples`` cut in ``count`` parts, the same whenever and in whatever order this is done."""
    result: list[list[Sample]] = [[] for _ in range(count)]
    for index, sample in enumerate(sorted(samples, key=lambda sample: (sample.place, sample.seconds))):
        result[index % count].append(sample)
    return result
