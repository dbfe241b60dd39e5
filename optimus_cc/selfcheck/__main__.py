"""One rank of a self-check: ``python -m optimus_cc.selfcheck FOLDER``, started by a launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from optimus_cc.process import Report, leave_at_once, run_rank


def _check(path: Path, report: Report) -> int:
    # Bits are compared: kernels that add up in whatever order they come to would differ from themselves.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    import torch.distributed as dist

    from optimus_cc.runs import RunFolder
    from optimus_cc.selfcheck import plan
    from optimus_cc.training import backend as backends

    folder = RunFolder(path)
    config = plan.tiny(folder.run_config())
    backends.choose_device(config)

    from optimus_cc.selfcheck import checks
    from optimus_cc.selfcheck.trainings import Trainings

    backend = backends.start(config)
    # A rank that an exception took out of a check waits here until the others have waited for it there, perhaps twice.
    verdicts = dist.new_group(backend="gloo", timeout=timedelta(seconds=3 * config.training.timeout_s))
    world = checks.World(Trainings(config, backend, report.beat), path, verdicts)

    def note(record: Mapping[str, Any]) -> None:
        report.beat()
        if report.rank == 0 or record["kind"] == "exception":  # which no verdict may come to tell
            folder.append_metrics(record)

    found = []
    for verdict in checks.run(world, note):
        report.beat()
        found.append(verdict)
        if report.rank == 0:
            folder.append_metrics(verdict)
    if report.rank == 0:
        folder.write_summary({"checks": found, "backend": dist.get_backend(), "device": backend.device.type})
    if any(verdict["verdict"] == "FAILED" for verdict in found):
        leave_at_once(0)  # the verdict is there; communicators may be broken
    backends.stop()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m optimus_cc.selfcheck FOLDER")
    sys.exit(run_rank(lambda report: _check(Path(sys.argv[1]), report)))
