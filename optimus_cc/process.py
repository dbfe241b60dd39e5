"""What a rank and its supervisor tell each other, through the environment, signals and small files. No torch.

A rank runs in :func:`run_rank`, and calls ``report.beat()`` at least once a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from optimus_cc.records import read_json_object, replace_file, to_json

RENDEZVOUS = "OPTIMUS_CC_RENDEZVOUS"
"""``init_method`` of torch.distributed for this start; a new one for each start."""
DEVICE = "OPTIMUS_CC_DEVICE"
"""``cpu`` or ``cuda``, decided before the ranks start."""
LOG_DIR = "OPTIMUS_CC_LOG_DIR"
SUPERVISOR_PID = "OPTIMUS_CC_SUPERVISOR_PID"
"""Of the process that started this one: its supervisor, or a parent that forks for supervisors."""

SLEEPING_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Has OpenMP's threads sleep while they wait for work, for processes that import torch.

They spin otherwise: for milliseconds, on cores that other processes need, and each operation waits for a thread that
has not got its core. The results are the same. GNU's, LLVM's and Intel's libraries all read it when they are loaded;
GOMP_SPINCOUNT and KMP_BLOCKTIME come before it.
"""

EXIT_PREEMPTED = 75
"""How a rank ends that was asked to stop at the next step boundary (EX_TEMPFAIL: try again later)."""

_PR_SET_PDEATHSIG = 1
_COMMUNICATION_TYPES = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"}
_COMMUNICATION_WORDS = (
    "gloo/",
    "Gloo connectFullMesh",
    "ProcessGroupNCCL",
    "Watchdog caught collective operation timeout",
    "NCCL error",
    "ncclRemoteError",
    "ncclSystemError",
    "Connection closed by peer",
    "Connection reset by peer",
    "wait timeout after",
)


def run_rank(body: Callable[[Report], int]) -> int:
    """What a rank does from its first line on: ``body``, whose exit code this returns, under its supervisor's eyes."""
    let_threads_sleep()
    die_with_parent()
    install_stack_dump()
    # Megatron-core warns at import about every optional package that is not there.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    report = Report.from_environment()
    try:
        return body(report)
    except BaseException as error:
        report.failed(error)
        traceback.print_exc()
        leave_at_once()


def leave_at_once(code: int = 1) -> NoReturn:
    """End without waiting for communicators whose peers may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Make the kernel kill this process when its supervisor dies.

    A second line of defence, on Linux only: the supervisor's guard kills whole process groups, everywhere. For ranks
    only: a process that a rank starts inherits the environment but has another parent.
    """
    end_with(int(os.environ.get(SUPERVISOR_PID) or os.getppid()))


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent does not live any more, or has gone already. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above took effect


def let_threads_sleep() -> None:
    """:data:`SLEEPING_THREADS` for this process, unless the user has said otherwise. Before torch is imported."""
    for name, value in SLEEPING_THREADS.items():
        os.environ.setdefault(name, value)


def install_stack_dump() -> None:
    """SIGUSR1 writes the stacks of all threads to stderr, also of a rank that hangs in C; so does a fatal signal."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone or silent, rather than what went wrong."""
    if any(kind.__name__ in _COMMUNICATION_TYPES for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and speaks_of_communication(str(error))


def speaks_of_communication(text: str) -> bool:
    """Whether a message or a log comes from gloo or NCCL losing a peer."""
    return any(word in text for word in _COMMUNICATION_WORDS)


@dataclass(frozen=True)
class Failure:
    """What a rank wrote about the exception that ended it."""

    time: float
    """Seconds since the epoch."""
    exception: str
    message: str
    communication: bool
    """The rank only lost contact with another one; that one is the culprit."""


class Report:
    """A rank's side: heartbeats and the failure that ended it. Without a supervisor it does nothing."""

    def __init__(self, log_dir: Path | None, rank: int) -> None:
        self._log_dir = log_dir
        self.rank = rank
        self._next_beat = 0.0

    @classmethod
    def from_environment(cls) -> Report:
        log_dir = os.environ.get(LOG_DIR)
        return cls(Path(log_dir) if log_dir else None, int(os.environ.get("RANK", "0")))

    def beat(self) -> None:
        """Say that this rank makes progress. Cheap: touches a file, at most once a second."""
        now = time.monotonic()
        if self._log_dir is None or now < self._next_beat:
            return
        self._next_beat = now + 1
        with contextlib.suppress(OSError):  # a full disk is no reason to end a run
            heartbeat_path(self._log_dir, self.rank).touch()

    def failed(self, error: BaseException, *, communication: bool | None = None) -> None:
        """Record the exception that ends this rank; the earliest that isn't a lost connection is named as the cause."""
        if self._log_dir is None:
            return
        if communication is None:
            communication = is_communication_error(error)
        record = {
            "time": time.time(),
            "exception": type(error).__name__,
            "message": str(error),
            "communication": communication,
        }
        with contextlib.suppress(OSError):  # the traceback in the log has to do
            replace_file(failure_path(self._log_dir, self.rank), to_json(record))


def log_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank_{rank}.log"


def failure_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank_{rank}.failure.json"


def heartbeat_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank_{rank}.heartbeat"


def read_failure(log_dir: Path, rank: int) -> Failure | None:
    """What a rank reported before it ended, if anything readable."""
    record = read_json_object(failure_path(log_dir, rank))
    if record is None:
        return None
    try:
        return Failure(
            time=float(record["time"]),
            exception=str(record["exception"]),
            message=str(record["message"]),
            communication=bool(record["communication"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def last_heartbeat(log_dir: Path, rank: int) -> float | None:
    """When a rank last reported progress, in seconds since the epoch; None if it never did."""
    try:
        return heartbeat_path(log_dir, rank).stat().st_mtime
    except OSError:
        return None
