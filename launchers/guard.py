"""Cleans up after a supervisor of ranks that dies without a chance to do it itself (``kill -9``).

Run as a script, outside the groups that it guards; standard library only. The supervisor writes one number a line:
``G`` guards group G, ``-G`` lets go of it. At the end of input, or when its parent changes, this process kills the
groups that it still guards, removes the supervisor's scratch folder, and ends.
"""

import contextlib
import os
import select
import shutil
import signal
import sys


def main(supervisor: int, scratch: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    pending = b""
    while os.getppid() == supervisor:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            group = int(line)
            if group > 0:
                groups.add(group)
            else:
                groups.discard(-group)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
