"""Checks on this machine what the numbers stand on: one process per rank, a line for each check."""

from __future__ import annotations

import sys
from typing import Any

from launchers import own_folder
from launchers.local import choose_device, relative
from launchers.progress import Progress
from launchers.supervise import Stop
from optimus_cc.config import RunConfig
from optimus_cc.runs import SELFCHECKS, RunFailed, RunFolder
from optimus_cc.selfcheck import plan, report

COMMAND = [sys.executable, "-m", "optimus_cc.selfcheck"]


def selfcheck(config: RunConfig) -> dict[str, Any]:
    """Run every check in the layout of ``config``, on its device.

    It leaves ``runs_dir/selfchecks/LAYOUT-TIME`` with configuration, origin, verdicts (``metrics.jsonl``,
    ``summary.json``) and logs.

    Returns:
        the verdicts.

    Raises:
        ConfigError: it can't run on this machine; nothing was started.
        RunFailed: a check failed or a rank died, or somebody asked for an end; says what to report.
    """
    tiny = plan.tiny(config)
    ranks = config.parallel.world_size
    device, notices = choose_device(config)
    progress = Progress(0)
    verdicts: list[dict[str, Any]] = []
    exceptions: list[dict[str, Any]] = []
    current = "start"

    def on_records(records: list[dict[str, Any]]) -> None:
        nonlocal current
        for record in records:
            if record["kind"] == "begin":
                current = record["check"]
            elif record["kind"] == "exception":
                exceptions.append(record)
            elif record["kind"] == "check":
                verdicts.append(record)
                current = "end"
                progress.print(report.line(record))

    with Stop().on_signals() as stop:
        folder = own_folder.make_folder(config, SELFCHECKS, config.parallel.label)
        model = tiny.model
        text = f"{config.parallel.label}, {config.training.precision}, {config.optimizer.name}"
        own_folder.show_heading(progress, "selfcheck", text, ranks, device, folder, notices)
        progress.print(
            f"{'model':<11}{model.num_layers} layers of {model.hidden_size}, {tiny.num_microbatches} micro-batches of "
            f"{tiny.training.micro_batch_size} x {model.sequence_length} synthetic tokens"
        )
        try:
            own_folder.run([*COMMAND, str(folder.path)], ranks, tiny, device, folder, stop, progress, on_records)
        except RunFailed as error:
            if error.state != "failed":
                raise type(error)(f"the self-check ended: {error.cause}", error.details) from None
            verdict = _of_dead_ranks(current, error, exceptions)
            print(report.line(verdict))
            raise _failed([*verdicts, verdict], config, device, folder, error.details) from None
    result = folder.summary()
    if result is None:
        raise RunFailed("the ranks ended without a verdict", f"  See their logs in {folder.logs}.")
    if any(verdict["verdict"] == "FAILED" for verdict in result["checks"]):
        raise _failed(result["checks"], config, device, folder)
    print("every check that applies is ok")
    return result


def _of_dead_ranks(check: str, error: RunFailed, exceptions: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict of the check in which the ranks ended without one."""
    first = [f"rank {exceptions[0]['rank']} first raised {exceptions[0]['said']}"] if exceptions else []
    return {"check": check, "verdict": "FAILED", "said": "; ".join([*first, error.cause])}


def _failed(
    verdicts: list[dict[str, Any]], config: RunConfig, device: str, folder: RunFolder, details: str = ""
) -> RunFailed:
    """What ends a self-check in which something failed."""
    failed = [verdict for verdict in verdicts if verdict["verdict"] == "FAILED"]
    backend = (folder.summary() or {}).get("backend") or ("nccl" if device == "cuda" else "gloo")
    told = report.problem_report(failed, config, folder.provenance() or {}, device, backend, relative(folder.path))
    names = ", ".join(verdict["check"] for verdict in failed)
    return RunFailed(f"the self-check found a fault: {names}", "\n".join(filter(None, [details, told])))
