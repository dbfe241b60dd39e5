"""In jobs that have this folder in their PYTHONPATH: ranks that train nothing, in place of the real ones.

What they do is told by the variable FAKE: ``steps``, ``step_s``, and ``failing_rank``, which raises. Each step they
save; asked to end they end at the same step, as the trainer does.
"""

import os
import sys

if "optimus_cc.training.corpus" in sys.orig_argv:
    os._exit(0)

if "launchers.slurm.node" in sys.orig_argv:  # which looks whether there is one
    from optimus_cc.training import corpus

    corpus.is_prepared = lambda config: True

if "launchers.slurm.job" in sys.orig_argv and os.environ.get("FAKE") == "done":  # whole jobs that do nothing
    with open(sys.orig_argv[-1]) as file:
        run = file.read().splitlines()[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    with open(f"{run}/status.json.part", "w") as file:
        file.write('{"state": "finished", "step": 1, "total_steps": 1}')
    os.rename(f"{run}/status.json.part", f"{run}/status.json")
    os._exit(0)

if "optimus_cc.training" in sys.orig_argv:
    import json
    import signal
    import time
    from pathlib import Path

    from optimus_cc.process import EXIT_PREEMPTED, Report, run_rank
    from optimus_cc.runs import RunFolder

    def train(report: Report) -> int:
        folder = RunFolder(sys.orig_argv[-1])
        fake = json.loads(os.environ["FAKE"])
        asked: list[int] = []
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: asked.append(number))
        saved, ask = folder.checkpoints / "fake_step", folder.logs / "asked"
        folder.checkpoints.mkdir(exist_ok=True)
        world = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OPTIMUS_CC_RENDEZVOUS")}
        print(json.dumps({**world, "host": os.uname().nodename, "pid": os.getpid()}), flush=True)
        step = int(saved.read_text()) if saved.exists() else 0
        if report.rank == fake.get("failing_rank"):
            raise RuntimeError("this was to be expected")
        while step < fake["steps"]:
            step += 1
            report.beat()
            time.sleep(fake["step_s"])
            if report.rank == 0:
                folder.append_metrics({"kind": "train", "step": step, "loss": 1 / step})
                saved.write_text(str(step))
            if asked:
                ask.touch()
            if ask.exists():
                return EXIT_PREEMPTED
        if report.rank == 0:
            folder.write_summary({"run_id": folder.run_id, "steps": step, "validation": {"loss": 0.5}})
        return 0

    Path(sys.orig_argv[-1], "logs").mkdir(exist_ok=True)
    os._exit(run_rank(train))
