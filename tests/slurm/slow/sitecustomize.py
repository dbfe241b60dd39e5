"""In jobs that have this folder in their PYTHONPATH: real ranks that take SLOW seconds longer for each heartbeat, of
which a step has one."""

import os
import sys

if "optimus_cc.training" in sys.orig_argv:
    import time

    from optimus_cc.process import Report

    beat = Report.beat

    def slow_beat(report: Report) -> None:
        beat(report)
        time.sleep(float(os.environ["SLOW"]))

    Report.beat = slow_beat  # type: ignore[assignment]
