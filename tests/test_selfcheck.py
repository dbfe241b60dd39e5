"""The self-check: it finds nothing where nothing is wrong, and each check finds what it is there for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launchers import own_folder
from launchers import selfcheck as launcher
from optimus_cc.config import RunConfig
from optimus_cc.exposure import Message, Schedule
from optimus_cc.runs import RunFailed, RunFolder
from optimus_cc.selfcheck import plan, report
from optimus_cc.selfcheck.compare import Comparison
from tests.config.command_line import one
from tests.configurations import tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world

ROOT = Path(__file__).parents[1]
NAMES = ["baseline", "messages", "bytes", "fused_embedding", "stage_compression", "resume", "replicas"]
Fault = Callable[[], Any]


def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    from analysis.table import collect  # here, because ranks import this module and not its pandas

    command = [sys.executable, str(ROOT / "run.py"), "task=selfcheck", "parallel=pp2", "training.device=cpu"]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.split(" ")[0] in NAMES]
    assert [line.split()[0] for line in lines] == NAMES
    one_replica = {"stage_compression", "replicas"}
    for name, line in zip(NAMES, lines, strict=True):
        assert ("does not apply: " if name in one_replica else f"{name:<17}  ok  ") in line
    assert "tolerance 1e-04" in " ".join(result.stdout.split())
    (path,) = (tmp_path / "runs" / "selfchecks").iterdir()
    summary = RunFolder(path).summary()
    assert summary is not None
    assert [check["check"] for check in summary["checks"]] == NAMES
    assert not (path / "checkpoints").exists()
    assert collect(tmp_path / "runs") == ([], []), "a self-check was taken for a run"


# -- faults in the library ---------------------------------------------------------------------------------------------


def _patched(owner: str, name: str, make: Callable[[Any], Any]) -> Any:
    """Replace an attribute of a class or a module by what ``make`` makes of it."""
    import importlib

    module, _, member = owner.partition(":")
    target = importlib.import_module(module)
    target = getattr(target, member) if member else target
    return mock.patch.object(target, name, make(getattr(target, name)))


def _replica() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank()  # type: ignore[no-any-return]


def perturbed_gradient() -> Any:
    def make(original: Any) -> Any:
        return lambda self, tensor, direction: original(
            self, tensor * (1 + 2**-20) if tensor is not None and direction == "backward" else tensor, direction
        )

    return _patched("optimus_cc.communication.pipeline:CompressedP2PCommunicator", "_outgoing", make)


def forgotten_residuals() -> Any:
    return _patched(
        "optimus_cc.compression.error_feedback:CompressedStream", "remember", lambda _: lambda self: self.reset()
    )


def validation_that_resets() -> Any:
    def make(original: Any) -> Any:
        def begin(self: Any, num_microbatches: int, forward_only: bool) -> None:
            original(self, num_microbatches, forward_only)
            if forward_only:
                self._reset()

        return begin

    return _patched("optimus_cc.communication.pipeline:CompressedP2PCommunicator", "begin", make)


def miscounting_meter() -> Any:
    def make(original: Any) -> Any:
        return lambda self, name, logical, wire: original(self, name, logical + 4 * (name == "embedding"), wire)

    return _patched("optimus_cc.communication.traffic:TrafficMeter", "add", make)


def unscaled_embedding() -> Any:
    return _patched("optimus_cc.communication.embedding", "gradient_scale", lambda _: lambda bucket, group: 1.0)


def forgotten_embedding() -> Any:
    return _patched(
        "optimus_cc.communication.embedding:FusedEmbeddingSync", "synchronize", lambda _: lambda self, force=False: None
    )


def drifting_copy() -> Any:
    """The last stage's gradient differs by less than rounding may."""

    def make(original: Any) -> Any:
        def synchronize(self: Any, force_all_reduce: bool = False) -> None:
            from megatron.core import parallel_state

            original(self, force_all_reduce)
            if parallel_state.is_pipeline_last_stage() and self._weight is not None:
                self._weight.main_grad.mul_(1 + 2**-20)

        return synchronize

    return _patched("optimus_cc.communication.embedding:FusedEmbeddingSync", "synchronize", make)


def no_warm_up() -> Any:
    return _patched(
        "optimus_cc.communication.data_parallel:SelectiveStageCompression", "active", lambda _: property(lambda _: True)
    )


def endless_warm_up() -> Any:
    return _patched(
        "optimus_cc.communication.data_parallel:SelectiveStageCompression",
        "active",
        lambda _: property(lambda _: False),
    )


def sum_for_mean() -> Any:
    return _patched("optimus_cc.communication.data_parallel", "gradient_scale", lambda _: lambda bucket, group: 1.0)


def lost_error_memory() -> Any:
    def make(original: Any) -> Any:
        return lambda self, state: original(self, {key: v for key, v in state.items() if key != "memory"})

    return _patched("optimus_cc.compression.error_feedback:CompressedStream", "load_state_dict", make)


def drifting_replica() -> Any:
    def make(original: Any) -> Any:
        def train_step(self: Any, batches: Any) -> Any:
            result = original(self, batches)
            if _replica() == 1:
                with torch.no_grad():
                    next(self.model[0].parameters()).view(-1)[0] += 1e-3
            return result

        return train_step

    return _patched("optimus_cc.training.loop:Trainer", "train_step", make)


FAULTS: list[tuple[str, Fault, str]] = [
    ("baseline", perturbed_gradient, "step 1, "),
    ("messages", forgotten_residuals, "set of error memories"),
    ("messages", validation_that_resets, "after validation"),
    ("bytes", miscounting_meter, "embedding logical_bytes"),
    ("fused_embedding", unscaled_embedding, "step 1, gradient norm"),
    ("fused_embedding", forgotten_embedding, "step 1, gradient norm"),
    ("fused_embedding", drifting_copy, "embedding's shard 0 (beside rank"),
    ("stage_compression", no_warm_up, "rank 1 after a warm-up"),
    ("stage_compression", endless_warm_up, "fewer bytes are sent"),
    ("stage_compression", sum_for_mean, "full rank: step 1, gradient norm"),
    ("resume", lost_error_memory, ""),
    ("replicas", drifting_replica, "[0"),
]
"""Check, fault, and a part of what the check must say."""


def _verdicts(config: RunConfig, folder: Path, cases: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Verdicts on this rank: of each check, with a fault (by the name of its function) while it runs, "" for none."""
    from optimus_cc.selfcheck import checks
    from optimus_cc.selfcheck.trainings import Trainings

    backend = backend_in_world(config)
    group = dist.new_group(backend="gloo")
    found = []
    for number, (name, fault) in enumerate(cases):
        world = checks.World(Trainings(config, backend), folder / str(number), group)
        chosen = tuple(check for check in checks.CHECKS if name in (check.name, "*"))
        with globals()[fault]() if fault else _nothing():
            found += list(checks.run(world, lambda record: None, chosen))
    return found


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_every_check_finds_its_fault_and_nothing_else(ranks: RankPool, tmp_path: Path) -> None:
    config = plan.tiny(tiny({"pipeline_parallel_size": 2, "data_parallel_size": 2}))
    cases = [("*", ""), *((name, fault.__name__) for name, fault, _ in FAULTS)]
    results = ranks.run(4, _verdicts, config, tmp_path, cases, timeout_s=900)
    assert all(result == results[0] for result in results), "ranks came to different verdicts"
    sound, broken = results[0][: len(NAMES)], results[0][len(NAMES) :]
    assert [(verdict["check"], verdict["verdict"]) for verdict in sound] == [(name, "ok") for name in NAMES], sound
    for (name, fault, said), verdict in zip(FAULTS, broken, strict=True):
        assert (verdict["check"], verdict["verdict"]) == (name, "FAILED"), (fault.__name__, verdict)
        assert said in verdict["said"], (fault.__name__, verdict)
        assert verdict["said"].startswith("rank ")


def one_more_message_at_one_end() -> Any:
    """The last stage takes one message more for an epilogue message than its receiver does."""

    def make(original: Any) -> Any:
        def sent_backward(self: Schedule, rank: int) -> tuple[Message, ...]:
            messages = list(original(self, rank))
            if dist.get_rank() == 1:
                first = next(index for index, message in enumerate(messages) if message.epilogue)
                messages[first - 1] = replace(messages[first - 1], epilogue=True)
            return tuple(messages)

        return sent_backward

    return _patched("optimus_cc.exposure:Schedule", "sent_backward", make)


def test_ends_that_disagree_and_an_exception_hang_nobody(ranks: RankPool, tmp_path: Path) -> None:
    config = plan.tiny(tiny("pp2", timeout_s=30.0))
    results = ranks.run(2, _verdicts, config, tmp_path, [("*", one_more_message_at_one_end.__name__)], timeout_s=600)
    assert results[0] == results[1]
    verdicts = {verdict["check"]: verdict for verdict in results[0]}
    assert verdicts["baseline"]["verdict"] == "ok"
    assert verdicts["messages"]["verdict"] == "FAILED"
    assert verdicts["bytes"]["verdict"] == "FAILED"
    assert "not run: after the exception in messages" in verdicts["bytes"]["said"]
    assert verdicts["replicas"]["verdict"] == "does not apply"


def test_what_does_not_apply_is_said(ranks: RankPool, tmp_path: Path) -> None:
    config = plan.tiny(one("task=selfcheck parallel=single"))
    (found,) = ranks.run(1, _verdicts, config, tmp_path, [("*", "")])
    said = {verdict["check"]: (verdict["verdict"], report.line(verdict)) for verdict in found}
    assert list(said) == NAMES
    assert [name for name in NAMES if said[name][0] == "ok"] == ["baseline", "resume"]
    reasons = {
        "messages": "does not apply: it needs more than one pipeline stage",
        "bytes": "does not apply: with one stage and one data-parallel rank",
        "fused_embedding": "does not apply: it needs more than one pipeline stage",
        "stage_compression": "does not apply: it needs more than one data-parallel rank",
        "replicas": "does not apply: there is one data-parallel rank",
    }
    for name, reason in reasons.items():
        assert reason in said[name][1]


# -- what it runs and what it says -------------------------------------------------------------------------------------


def test_the_tiny_model_keeps_what_is_the_users() -> None:
    line = (
        "task=selfcheck parallel=tp2_pp2_dp2 parallel.sequence_parallel=true parallel.distributed_optimizer=true "
        "training.precision=bf16 training.recompute=full model.tied_embeddings=false"
    )
    users = one(line)
    config = plan.tiny(users)
    assert config.parallel == users.parallel
    assert (config.training.precision, config.training.recompute) == ("bf16", "full")
    assert plan.tiny(one("task=selfcheck parallel=pp2 optimizer.name=sgd")).optimizer.name == "sgd"
    assert not config.model.tied_embeddings
    assert config.num_microbatches > config.parallel.pipeline_parallel_size, "nothing would be outside the epilogue"
    label = plan.everything(config).label
    assert "cb" in label
    assert "sc" in label
    assert "fe" not in label, "untied embeddings are never fused"


@pytest.mark.parametrize("layout", ["single", "dp2", "tp2", "pp4", "pp2_v2", "pp4_v2", "pp2_dp4", "tp8_pp4_dp4"])
def test_every_layout_has_a_tiny_model(layout: str) -> None:
    said = "model.num_attention_heads=8 model.num_layers=8 cluster.ranks_per_node=128"
    plan.tiny(one(f"task=selfcheck parallel={layout} {said}"))


def test_comparisons() -> None:
    """The first difference is kept with its place and both values; NaN is equal to nothing."""
    comparison = Comparison()
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0001]])
    comparison.close("w", a, b, 1e-4)
    comparison.same_bits("w", a, a.clone())
    assert comparison.difference is None
    assert comparison.largest == pytest.approx(1e-4 / 4.0001, rel=1e-2)
    with comparison.about("here"):
        comparison.close("w", a, b, 1e-6)
    comparison.equal("n", 1, 2)
    assert comparison.difference is not None
    assert comparison.difference.startswith("here: w[1, 1] is 4 in place of 4.0001")
    for compare in (
        lambda c: c.same_bits("x", torch.tensor(float("nan")), torch.tensor(float("nan"))),
        lambda c: c.close("x", torch.tensor(float("nan")), torch.tensor(1.0), 1.0),
        lambda c: c.equal("x", float("nan"), float("nan")),
        lambda c: c.same_bits("x", torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        lambda c: c.all_same_bits("x", {"p": torch.zeros(1)}, {"q": torch.zeros(1)}),
        lambda c: c.holds("x", False),
    ):
        fresh = Comparison()
        compare(fresh)
        assert fresh.difference is not None


BEGIN = {"kind": "begin", "check": "messages"}
OK = {"kind": "check", "check": "baseline", "verdict": "ok", "said": "equal", "values": 3, "tolerance": 0.0}
BAD = {"kind": "check", "check": "bytes", "verdict": "FAILED", "said": "rank 1: step 2, loss is 7 in place of 6"}


def test_a_failure_ends_with_what_to_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*arguments: Any) -> None:
        folder, on_records = arguments[4], arguments[-1]
        folder.write_summary({"checks": [OK, BAD], "backend": "gloo"})
        on_records([OK, BAD])

    monkeypatch.setattr(own_folder, "run", run)
    with pytest.raises(RunFailed) as caught:
        launcher.selfcheck(one(f"task=selfcheck parallel=pp2 training.device=cpu runs_dir={tmp_path}"))
    told = str(caught.value)
    assert caught.value.exit_code == 1
    assert caught.value.cause == "the self-check found a fault: bytes"
    for part in (BAD["said"], "pp2, overlap_p2p=false", "fp32, adam", "gloo on cpu", "torch 2", "megatron-core 0"):
        assert part in " ".join(told.split())
    (folder,) = (tmp_path / "selfchecks").iterdir()
    assert folder.name in told


def test_ranks_that_die_fail_the_check_they_were_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*arguments: Any) -> None:
        arguments[-1]([OK, BEGIN, {"kind": "exception", "check": "messages", "rank": 1, "said": "ValueError: no"}])
        raise RunFailed("rank 0 was killed by SIGABRT", "  its log")

    monkeypatch.setattr(own_folder, "run", run)
    with pytest.raises(RunFailed) as caught:
        launcher.selfcheck(one(f"task=selfcheck parallel=pp2 training.device=cpu runs_dir={tmp_path}"))
    told = " ".join(str(caught.value).split())
    assert "found a fault: messages" in told
    assert "rank 1 first raised ValueError: no; rank 0 was killed by SIGABRT" in told
    assert "its log" in told
