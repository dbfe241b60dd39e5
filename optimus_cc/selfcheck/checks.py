"""The checks, one after another in one world of ranks, and the verdict that all ranks come to."""

from __future__ import annotations

import hashlib
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from optimus_cc import stage_traffic
from optimus_cc.config import RunConfig
from optimus_cc.process import is_communication_error
from optimus_cc.selfcheck import plan
from optimus_cc.selfcheck.compare import Comparison
from optimus_cc.selfcheck.trainings import State, Step, Trainings

EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass
class World:
    """What a check has on one rank."""

    trainings: Trainings
    folder: Path
    """Shared by all ranks; for files that a check needs."""
    verdicts: dist.ProcessGroup
    """All ranks, over gloo, for nothing but this: a rank may come here while others still wait in other groups."""

    @property
    def config(self) -> RunConfig:
        return self.trainings.config

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gives, by rank. Collective."""
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine, group=self.verdicts)
        return everyones


@dataclass(frozen=True)
class Check:
    name: str
    obstacle: Callable[[RunConfig], str | None]
    """Why it does not apply to a tiny configuration; None if it does."""
    run: Callable[[World, Comparison], str]
    """Compares; returns what was compared, the same words on every rank. Collective."""


def _baseline(world: World, comparison: Comparison) -> str:
    plain = world.trainings.plain()
    again = Comparison()
    _same_training(again, world.trainings.plain(), plain)
    if any(world.gather(again.difference)):
        why = f"on this rank: {again.difference}" if again.difference else "on other ranks"
        comparison.holds(f"Megatron-core alone repeats itself bit for bit here ({why})", False)
    _same_training(comparison, world.trainings.baseline, plain)
    return f"{plan.STEPS} steps equal plain Megatron-core's bit for bit: losses, gradient norms, weights"


def _messages(world: World, comparison: Comparison) -> str:
    trainings, baseline = world.trainings, world.trainings.baseline
    for epilogue_only in (True, False):
        technique = plan.low_rank(plan.FULL_RANK, epilogue_only=epilogue_only)
        with comparison.about(f"full rank, epilogue_only={str(epilogue_only).lower()}"):
            steps = trainings.ours(technique)
            _close_training(comparison, world, steps, baseline)
            _memories(comparison, world, technique, steps)
    with comparison.about("top-k of all entries, both directions"):
        technique = plan.lossless_top_k()
        steps = trainings.ours(technique)
        _same_training(comparison, steps, baseline)
        for name, memory in _memories(comparison, world, technique, steps).items():
            comparison.same_bits(name, memory, torch.zeros_like(memory))
    for residual in ("carry", "reset", "flush"):
        technique = plan.low_rank(1, residual=residual)
        with comparison.about(f"rank 1, residual={residual}"):
            for name, memory in _memories(comparison, world, technique, trainings.ours(technique)).items():
                comparison.holds(f"{name} is finite and not zero", bool(memory.isfinite().all() and memory.any()))
    return "what codecs that lose nothing send trains like the baseline; every error memory is where it should be"


def _memories(comparison: Comparison, world: World, technique: Any, steps: list[Step]) -> State:
    """The error memories after the last step, one for each stream of this rank that had something left to keep."""
    config, cb = world.config, technique.cb
    sent = config.schedule.sent_backward(parallel_state.get_pipeline_model_parallel_rank())
    compressed = {
        f"backward.{message.boundary}.memory"
        for message in sent
        if message.is_compressed(epilogue_only=cb.epilogue_only, flush=cb.flushes)
    }
    for number, step in enumerate(steps, start=1):
        comparison.all_same_bits(f"step {number}, after validation:", step.state_after_validation, step.state)
    found = {name: value for name, value in steps[-1].state.items() if name.endswith(".memory")}
    comparison.equal("set of error memories", sorted(found), sorted(compressed) if cb.residual == "carry" else [])
    return found


def _bytes(world: World, comparison: Comparison) -> str:
    config = world.config
    techniques = {
        "baseline": plan.BASELINE,
        "cb": plan.low_rank(1, epilogue_only=True),
        "cb, all messages": plan.lossless_top_k(),
        "fe": plan.FUSED_EMBEDDING,
    }
    padded = {"data_parallel", "parameter_gather"} if config.parallel.distributed_optimizer else set()
    for name, technique in techniques.items():
        if plan.obstacle(config, technique) is not None:
            continue
        told = stage_traffic.traffic(config.with_technique(technique))
        told.pop("other", None)  # told in part only: without norms and control messages
        records = [record for record in world.trainings.recorded(technique).records if record["kind"] == "train"]
        with comparison.about(name):
            comparison.equal("number of training records", len(records), plan.STEPS)
            for record in records:
                for traffic_class, counts in told.items():
                    for kind, wanted in counts.items():
                        place = f"step {record['step']}, {traffic_class} {kind}"
                        found = record["traffic"][traffic_class][kind]
                        if traffic_class in padded:
                            comparison.holds(f"{place}: {found:.0f} of at least {wanted:.0f}", found >= wanted)
                        elif traffic_class.startswith("pipeline"):
                            comparison.equal(place, found, wanted)
                        else:  # (n - 1) / n of a whole number is not always a floating-point number
                            comparison.close_number(place, found, wanted, 1e-12)
    more = "; gradients and parameters at least, because buffers are padded" if padded else ""
    return f"bytes counted in a step equal those that task=exposure tells, for each class that it tells in full{more}"


def _bytes_obstacle(config: RunConfig) -> str | None:
    parallel = config.parallel
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return None
    return "with one stage and one data-parallel rank nothing is sent that task=exposure tells"


def _fused_embedding(world: World, comparison: Comparison) -> str:
    steps, baseline = world.trainings.ours(plan.FUSED_EMBEDDING), world.trainings.baseline
    # Until the first update both trainings are the same, so only the order of summation differs.
    norms = steps[0].grad_norm, baseline[0].grad_norm
    comparison.close_number("step 1, gradient norm", *norms, plan.REDUCTION_ROUNDING)
    _close_training(comparison, world, steps, baseline)
    shard = parallel_state.get_tensor_model_parallel_rank()
    copies = {
        f"embedding's shard {shard}": value
        for name, value in steps[-1].weights.items()
        if name.endswith(EMBEDDINGS) and value.numel()
    }
    _same_everywhere(world, comparison, copies)
    return "trains like two all-reduces do; all copies of the embedding are equal bit for bit"


def _stage_compression(world: World, comparison: Comparison) -> str:
    trainings, baseline = world.trainings, world.trainings.baseline
    with comparison.about("full rank"):
        full = trainings.ours(plan.selective(plan.FULL_RANK))
        comparison.close_number(
            "step 1, gradient norm", full[0].grad_norm, baseline[0].grad_norm, plan.ROUNDING["fp32"]
        )
        _close_training(comparison, world, full, baseline)
    with comparison.about("rank 1 after a warm-up"):
        warming = trainings.ours(plan.selective(1, warmup_steps=plan.STEPS - 1))
        _same_training(comparison, warming[:-1], baseline[:-1])
        sent = [step.data_parallel_bytes for step in warming]
        comparison.holds("compression begins when the warm-up has ended: fewer bytes are sent", sent[-1] < sent[-2])
    return "full rank trains like dense gradients; before its warm-up ends nothing changes, bit for bit"


def _resume(world: World, comparison: Comparison) -> str:
    technique = plan.everything(world.config)
    folder = world.folder / "checkpoints"
    whole = world.trainings.everything
    parts = world.trainings.recorded(technique, steps=plan.RESUME_STEPS, folder=folder)
    comparison.equal("number of records", len(parts.records), len(whole.records))
    for found, wanted in zip(parts.records, whole.records, strict=False):
        for key in wanted:
            comparison.equal(f"step {wanted['step']}, {wanted['kind']} record, {key}", found.get(key), wanted[key])
    comparison.all_same_bits("weight", parts.weights, whole.weights)
    comparison.all_same_bits("compressor state", parts.state, whole.state)
    if not any(world.gather(comparison.difference)) and dist.get_rank() == 0:
        shutil.rmtree(folder)
    return f"saved and gone on with in a new trainer, a training ends with the same bits ({technique.label})"


def _replicas(world: World, comparison: Comparison) -> str:
    place = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    weights = {
        f"weight {name} of tensor rank {place[0]}, stage {place[1]}": value
        for name, value in world.trainings.everything.weights.items()
    }
    _same_everywhere(world, comparison, weights)
    label = plan.everything(world.config).label
    return f"weights are equal bit for bit on all data-parallel ranks ({label})"


def _replicas_obstacle(config: RunConfig) -> str | None:
    return None if config.parallel.data_parallel_size > 1 else "there is one data-parallel rank"


def _needs(technique: Any) -> Callable[[RunConfig], str | None]:
    return lambda config: plan.obstacle(config, technique)


CHECKS = (
    Check("baseline", lambda config: None, _baseline),
    Check("messages", _needs(plan.low_rank(1)), _messages),
    Check("bytes", _bytes_obstacle, _bytes),
    Check("fused_embedding", _needs(plan.FUSED_EMBEDDING), _fused_embedding),
    Check("stage_compression", _needs(plan.selective(1)), _stage_compression),
    Check("resume", lambda config: None, _resume),
    Check("replicas", _replicas_obstacle, _replicas),
)


def run(
    world: World, record: Callable[[Mapping[str, Any]], None], checks: tuple[Check, ...] = CHECKS
) -> Iterator[dict[str, Any]]:
    """Run ``checks``, and yield the verdict of each, the same on every rank. Collective.

    Args:
        record: takes what only this rank knows: that a check begins, and the exception that ended it here.
    """
    out_of_step: str | None = None
    for check in checks:
        verdict: dict[str, Any] = {"kind": "check", "check": check.name}
        reason = check.obstacle(world.config)
        if reason is not None:
            yield {**verdict, "verdict": "does not apply", "said": reason}
            continue
        if out_of_step is not None:
            said = f"not run: after the exception in {out_of_step} the ranks may be out of step"
            yield {**verdict, "verdict": "FAILED", "said": said}
            continue
        record({"kind": "begin", "check": check.name})
        mine = _on_this_rank(world, check)
        if mine["exception"] is not None:
            record({"kind": "exception", "check": check.name, "rank": dist.get_rank(), "said": mine["exception"]})
        everyones = world.gather(mine)
        if any(one["exception"] is not None for one in everyones):
            out_of_step = check.name
        yield verdict | _agreed(everyones)


def _on_this_rank(world: World, check: Check) -> dict[str, Any]:
    comparison = Comparison()
    said, exception, communication = "", None, False
    try:
        said = check.run(world, comparison)
    except Exception as error:
        traceback.print_exc()
        communication = is_communication_error(error)
        exception = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return {
        "said": said,
        "exception": exception,
        "communication": communication,
        "difference": comparison.difference,
        "values": comparison.values,
        "largest": comparison.largest,
        "tolerance": comparison.tolerance,
    }


def _agreed(everyones: list[dict[str, Any]]) -> dict[str, Any]:
    """What the outcomes of all ranks amount to. Whoever only lost contact is not the culprit."""
    raised = [rank for rank, one in enumerate(everyones) if one["exception"] is not None]
    if raised:
        rank = min(raised, key=lambda rank: (everyones[rank]["communication"], rank))
        return {"verdict": "FAILED", "rank": rank, "said": f"rank {rank}: {everyones[rank]['exception']}"}
    for rank, one in enumerate(everyones):
        if one["difference"] is not None:
            return {"verdict": "FAILED", "rank": rank, "said": f"rank {rank}: {one['difference']}"}
    return {
        "verdict": "ok",
        "said": everyones[0]["said"],
        "values": sum(one["values"] for one in everyones),
        "largest": max(one["largest"] for one in everyones),
        "tolerance": max(one["tolerance"] for one in everyones),
    }


# -- comparing trainings -----------------------------------------------------------------------------------------------


def _same_training(comparison: Comparison, found: list[Step], wanted: list[Step]) -> None:
    for number, (a, b) in enumerate(zip(found, wanted, strict=True), start=1):
        comparison.same_bits(f"step {number}, loss", a.loss, b.loss)
        comparison.equal(f"step {number}, gradient norm", a.grad_norm, b.grad_norm)
        comparison.all_same_bits(f"step {number}, weight", a.weights, b.weights)


def _close_training(comparison: Comparison, world: World, found: list[Step], wanted: list[Step]) -> None:
    tolerance = plan.ROUNDING[world.config.training.precision]
    scale = world.trainings.largest_change
    for number, (a, b) in enumerate(zip(found, wanted, strict=True), start=1):
        comparison.close(f"step {number}, loss", a.loss, b.loss, tolerance)
        comparison.close_number(f"step {number}, gradient norm", a.grad_norm, b.grad_norm, tolerance)
        comparison.all_close(f"step {number}, weight", a.weights, b.weights, tolerance, scale)


def _same_everywhere(world: World, comparison: Comparison, tensors: State) -> None:
    """Ranks that give a tensor under the same name must give the same bits. Collective."""
    mine = {name: hashlib.sha256(_raw(value)).hexdigest() for name, value in tensors.items()}
    everyones: list[dict[str, str]] = world.gather(mine)
    comparison.values += sum(value.numel() for value in tensors.values())
    first: dict[str, int] = {}
    for rank, digests in enumerate(everyones):
        for name, digest in digests.items():
            origin = first.setdefault(name, rank)
            if everyones[origin][name] != digest:
                sent: list[Any] = [tensors[name].cpu() if dist.get_rank() == origin else None]
                dist.broadcast_object_list(sent, src=origin, group=world.verdicts)
                if dist.get_rank() == rank:
                    comparison.same_bits(f"{name} (beside rank {origin}'s)", tensors[name].cpu(), sent[0])
                return


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
