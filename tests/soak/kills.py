"""Processes of a run that are killed, and when."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optimus_cc.runs import RunFolder

if TYPE_CHECKING:
    from tests.soak.chains import Attempt


@dataclass(frozen=True)
class Process:
    """A process of a run."""

    pid: int
    role: str
    """``rank``, ``guard`` or ``other``."""

    def __str__(self) -> str:
        return f"{self.role} {self.pid}"


def processes_of(folder: RunFolder, supervisor: int) -> list[Process]:
    """All that a run's supervisor has started and that lives; the supervisor itself is not among them."""
    table = {pid: entry for pid in _pids() if (entry := _look(pid)) is not None}
    family = {supervisor}
    while True:
        more = {pid for pid, (parent, _, _) in table.items() if parent in family} - family
        if not more:
            break
        family |= more
    logs = str(folder.path.resolve())
    found = []
    for pid, (_, command, output) in table.items():
        is_rank = output.startswith(logs) and Path(output).name.startswith("rank_")
        if pid == supervisor or not (pid in family or is_rank):
            continue
        role = "rank" if is_rank else "guard" if "guard.py" in command else "other"
        found.append(Process(pid, role))
    return found


def parents_of_ranks() -> list[int]:
    """The processes of this one that ranks are forked from."""
    looks = ((pid, _look(pid)) for pid in _pids())
    return [pid for pid, look in looks if look and look[0] == os.getpid() and "launchers.processes.parent" in look[1]]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _look(pid: int) -> tuple[int, str, str] | None:
    """Parent, command line and what its output goes to; None if it is gone, or dead and not yet waited for."""
    place = Path("/proc") / str(pid)
    try:
        state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
        command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        output = os.readlink(place / "fd" / "1")
    except OSError:
        return None
    return None if state in "ZX" else (int(parent), command, output)


VICTIMS = (
    *("rank", "rank", "supervisor", "guard", "guard and supervisor", "node"),
    *("parent of the ranks", "SIGTERM", "SIGTERM to all", "Ctrl-C"),
)
MOMENTS = ("any", "step", "step", "saving", "saving")


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when.

    Args:
        moment: ``any`` time since the start; when a ``step`` is on the record, or a checkpoint is being written
            (``saving``), and some milliseconds after that.
    """

    victim: str
    moment: str
    number: int
    """Which step, or which checkpoint; the rank, by remainder."""
    share: float
    """Of the time that may pass, in [0, 1)."""

    def meet(self, attempt: Attempt) -> str:
        """Wait for the moment and strike; what was done, in words."""
        before = attempt.step()
        struck = self._wait(attempt, before)
        what = f"{self.victim} at {self.moment} {self.number} + {self.share:.2f}"
        if not struck or not attempt.running():
            return f"{what}: too late"
        for process, number in self._targets(attempt):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        return f"{what}, step {attempt.step()}"

    def _wait(self, attempt: Attempt, before: int) -> bool:
        def ready() -> bool:
            if self.moment == "step":
                return attempt.step() >= before + self.number
            if self.moment == "saving":
                return any(attempt.folder.checkpoints.glob(".step_*.partial"))
            return True

        while attempt.running():
            if ready():
                longest_s = {"any": 4.0, "step": 0.04, "saving": 0.05}[self.moment]
                time.sleep(self.share * longest_s)
                return True
            time.sleep(0.001)
        return False

    def _targets(self, attempt: Attempt) -> list[tuple[int, signal.Signals]]:
        supervisor = attempt.pid
        if self.victim in ("SIGTERM", "Ctrl-C"):
            return [(supervisor, signal.SIGTERM if self.victim == "SIGTERM" else signal.SIGINT)]
        found = processes_of(attempt.folder, supervisor)
        roles: dict[str, list[int]] = {}
        for process in found:
            roles.setdefault(process.role, []).append(process.pid)
        ranks, guards = sorted(roles.get("rank", [])), roles.get("guard", [])
        if self.victim == "rank":
            return [(ranks[self.number % len(ranks)], signal.SIGKILL)] if ranks else []
        if self.victim == "SIGTERM to all":
            return [(pid, signal.SIGTERM) for pid in (*ranks, supervisor)]
        chosen = {
            "supervisor": [supervisor],
            "guard": guards,
            "guard and supervisor": [*guards, supervisor],
            "node": [supervisor, *guards, *ranks],
            "parent of the ranks": parents_of_ranks(),
        }[self.victim]
        return [(pid, signal.SIGKILL) for pid in chosen]

    def explains(self, code: int, output: str) -> bool:
        """Whether this is how a run ends that met this fault."""
        if self.victim in ("supervisor", "guard and supervisor", "node"):
            return code == -signal.SIGKILL
        if self.victim == "parent of the ranks":
            return code == 1 and "the process that had started rank" in output
        if self.victim == "rank":
            return code == 1 and "was killed by SIGKILL" in output
        if self.victim in ("SIGTERM", "SIGTERM to all"):
            return (code == 75 and "preempted" in output) or code == -signal.SIGTERM
        if self.victim == "Ctrl-C":
            return code == 130 or code == -signal.SIGINT
        return False


def random_kill(chance: random.Random) -> Kill:
    return Kill(chance.choice(VICTIMS), chance.choice(MOMENTS), chance.randint(1, 2), chance.random())
