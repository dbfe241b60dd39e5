"""Turns the steps of a training into metrics records, and the records into a summary."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimus_cc.communication.traffic import TRAFFIC_CLASSES, ByteCount

if TYPE_CHECKING:
    from optimus_cc.training.loop import Trainer

WARM_UP_STEPS = 5
"""Steps left out of step-time statistics: the first ones allocate and compile."""


class History:
    """Loss, time and traffic of training steps, gathered over the steps between two records.

    Only :meth:`train_record` waits for the device. What is sent, and the time that passes, between :meth:`pause` and
    :meth:`resume` is not training's.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._created = time.perf_counter()
        self._step_times: list[float] = []
        self._totals = {name: ByteCount() for name in TRAFFIC_CLASSES}
        self._steps = 0
        self._last_loss = math.nan
        self._running_since = math.nan
        self._start_interval()

    def resume(self) -> None:
        """Training goes on from here. What was sent since :meth:`pause` (or while building) is forgotten."""
        self._trainer.attachment.traffic()
        self._trainer.backend.synchronize()
        self._running_since = time.perf_counter()

    def pause(self) -> None:
        """Something else than training comes next."""
        self._trainer.backend.synchronize()
        self._interval_s += time.perf_counter() - self._running_since
        self._count_traffic()

    def add(self, loss: torch.Tensor, grad_norm: float) -> None:
        """Take note of one step: this rank's mean loss, still on the device, and the global gradient norm."""
        self._loss_sum += loss
        self._grad_norm_sum += grad_norm
        self._interval_steps += 1

    def train_record(self) -> dict[str, Any]:
        """Means over the steps since the last record, the same on every rank; traffic is summed over ranks."""
        trainer, steps = self._trainer, self._interval_steps
        self._last_loss = trainer.mean_loss(self._loss_sum / steps)
        self.pause()
        step_time = self._interval_s / steps
        if trainer.step - steps >= WARM_UP_STEPS:
            self._step_times += [step_time] * steps
        record = {
            "kind": "train",
            "step": trainer.step,
            "loss": self._last_loss,
            "perplexity": perplexity(self._last_loss),
            "grad_norm": self._grad_norm_sum / steps,
            "learning_rate": trainer.learning_rate(),
            "tokens_per_s": self._tokens_per_step / step_time,
            "tflop_per_s_per_rank": self._flops_per_step / step_time / trainer.backend.world_size / 1e12,
            "step_time_s": step_time,
            "traffic": self._traffic_per_step(),
        }
        self._start_interval()
        self.resume()
        return record

    def state_dict(self) -> dict[str, Any]:
        """What a later History needs to go on as if nothing had happened. Call it after :meth:`pause`."""
        return {
            "loss_sum": self._loss_sum,
            "grad_norm_sum": self._grad_norm_sum,
            "interval_steps": self._interval_steps,
            "interval_s": self._interval_s,
            "interval_traffic": _plain(self._interval_traffic),
            "totals": _plain(self._totals),
            "steps": self._steps,
            "step_times": torch.tensor(self._step_times, dtype=torch.float64),
            "last_loss": self._last_loss,
            "wall_s": time.perf_counter() - self._created,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loss_sum = state["loss_sum"].to(self._trainer.backend.device)
        self._grad_norm_sum, self._last_loss = state["grad_norm_sum"], state["last_loss"]
        self._interval_steps, self._interval_s = state["interval_steps"], state["interval_s"]
        self._interval_traffic, self._totals = _counts(state["interval_traffic"]), _counts(state["totals"])
        self._steps, self._step_times = state["steps"], state["step_times"].tolist()
        self._created = time.perf_counter() - state["wall_s"]

    def summary(self, validated: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a training, with its last validation record."""
        times = sorted(self._step_times)
        step_time = None
        if times:
            step_time = {
                "mean": statistics.fmean(times),
                "median": statistics.median(times),
                "p95": times[min(len(times) - 1, int(0.95 * len(times)))],
            }
        return {
            "steps": self._trainer.step,
            "parameters": self._trainer.num_parameters,
            "train": {"loss": self._last_loss, "perplexity": perplexity(self._last_loss)},
            "validation": {key: validated[key] for key in ("loss", "perplexity", "tokens")},
            "step_time_s": step_time,
            "tokens_per_s": self._tokens_per_step / step_time["median"] if step_time else None,
            "traffic": {
                name: {
                    "logical_bytes_per_step": count.logical_bytes / self._steps,
                    "wire_bytes_per_step": count.wire_bytes / self._steps,
                    "logical_bytes": count.logical_bytes,
                    "wire_bytes": count.wire_bytes,
                }
                for name, count in self._totals.items()
            },
            "wall_s": time.perf_counter() - self._created,
        }

    @property
    def _tokens_per_step(self) -> int:
        config = self._trainer.config
        return config.training.global_batch_size * config.model.sequence_length

    @property
    def _flops_per_step(self) -> float:
        return self._trainer.config.model.flops_per_token(self._trainer.padded_vocabulary) * self._tokens_per_step

    def _start_interval(self) -> None:
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._trainer.backend.device)
        self._grad_norm_sum = 0.0
        self._interval_steps = 0
        self._interval_s = 0.0
        self._interval_traffic = {name: ByteCount() for name in TRAFFIC_CLASSES}

    def _count_traffic(self) -> None:
        for name, count in self._trainer.attachment.traffic().items():
            self._interval_traffic[name].add(count.logical_bytes, count.wire_bytes)

    def _traffic_per_step(self) -> dict[str, dict[str, float]]:
        """Bytes that all ranks together sent in a step, by class: the mean over the interval."""
        mine = self._interval_traffic
        values = [value for name in TRAFFIC_CLASSES for value in (mine[name].logical_bytes, mine[name].wire_bytes)]
        sums = iter(self._trainer.sum_over_ranks(values))
        steps = self._interval_steps
        self._steps += steps
        per_step: dict[str, dict[str, float]] = {}
        for name in TRAFFIC_CLASSES:
            logical, wire = next(sums), next(sums)
            self._totals[name].add(logical, wire)
            per_step[name] = {"logical_bytes": logical / steps, "wire_bytes": wire / steps}
        return per_step


def perplexity(loss: float) -> float:
    """Token perplexity of a mean loss per token (nats)."""
    return math.inf if loss > 700 else math.exp(loss)


def _plain(counts: Mapping[str, ByteCount]) -> dict[str, list[float]]:
    return {name: [count.logical_bytes, count.wire_bytes] for name, count in counts.items()}


def _counts(plain: Mapping[str, Sequence[float]]) -> dict[str, ByteCount]:
    return {name: ByteCount(*plain.get(name, ())) for name in TRAFFIC_CLASSES}
