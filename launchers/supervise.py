"""Starts the ranks of a run on this machine, watches them, and ends all of them when one ends badly."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from launchers.processes.preloaded import Forked, Lender, Line, Started, can_fork
from optimus_cc import process
from optimus_cc.process import EXIT_PREEMPTED, Failure
from optimus_cc.runs import RunCancelled, RunFailed, RunPreempted

LAST_LINES = 15
_KILL_WAIT_S = 10.0
_DUMP_WAIT_S = 2.0


class OthersMayBeTheCause(RunFailed):
    """Ranks lost contact or fell silent, which what happens to ranks elsewhere brings about, too."""


@dataclass(frozen=True)
class World:
    """A run whose ranks are on several hosts, as one of their supervisors sees it."""

    size: int
    """Ranks of all hosts."""
    first_rank: int
    """The lowest of this host's."""
    rendezvous: str
    """``init_method`` of torch.distributed, which all hosts can reach."""


class Stop:
    """A request to end a run: at the next step boundary, or at once. Comes from a signal or from a program."""

    def __init__(self) -> None:
        self.requested = False
        self.at_once = False
        self.reason = ""

    def request(self, reason: str, *, at_once: bool = False) -> None:
        """Ask once for an end at the next step boundary; ask twice, or with ``at_once``, for an end now."""
        self.at_once = self.at_once or at_once or self.requested
        self.requested = True
        self.reason = reason

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[Stop]:
        """SIGTERM and SIGUSR2 request an end, Ctrl-C and a closed terminal one at once. Main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self.request(
                "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name,
                at_once=number in (signal.SIGINT, signal.SIGHUP),
            )

        before = {}
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background jobs ignore some on purpose
                before[number] = signal.signal(number, handle)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class PatientStop(Stop):
    """One for a scheduler's signals, which come more than once: what is to end at once, it kills."""

    def request(self, reason: str, *, at_once: bool = False) -> None:
        if at_once or not self.requested:
            super().request(reason, at_once=at_once)


@dataclass
class _Rank:
    number: int
    name: str
    started_as: Started
    log: Path
    started: float
    ended: float | None = None
    code: int = 0
    """Exit code, negative for a signal; meaningful once ``ended`` is set."""
    failure: Failure | None = None

    def poll(self, log_dir: Path) -> bool:
        """Look for a report of failure, and whether it ended. Returns whether it ended just now."""
        if self.ended is not None:
            return False
        ended = self.started_as.poll() is not None
        if self.failure is None:  # a rank that has failed may still hang on its way out
            self.failure = process.read_failure(log_dir, self.number)
        if ended:
            self.ended = time.time()
            self.code = self.started_as.returncode
        return ended

    @property
    def lost_contact(self) -> bool:
        """It ended only because of what another rank did."""
        if self.failure is not None:
            return self.failure.communication
        # NCCL's watchdog and gloo's threads abort the process without a chance to report.
        return self.code == -signal.SIGABRT and process.speaks_of_communication("\n".join(last_lines(self.log, 100)))

    @property
    def orphaned(self) -> bool:
        return isinstance(self.started_as, Forked) and self.started_as.orphaned

    @property
    def end_time(self) -> float:
        return self.failure.time if self.failure is not None else self.ended or self.started

    @property
    def how(self) -> str:
        if self.failure is not None:
            message = " ".join(self.failure.message.split())
            return f"{self.name} failed with {self.failure.exception}: {shortened(message, 300)}"
        if self.orphaned:
            return f"the process that had started {self.name} died (out of memory, or killed by hand), and so did it"
        if self.code < 0:
            hint = " (out of memory, or killed by hand)" if self.code == -signal.SIGKILL else ""
            return f"{self.name} was killed by {_signal_name(-self.code)}{hint}"
        return f"{self.name} exited with code {self.code}"


def supervise(
    command: Sequence[str],
    num_ranks: int,
    *,
    log_dir: Path,
    stop: Stop | None = None,
    env: Mapping[str, str] | None = None,
    threads_per_rank: int | None = None,
    grace_s: float = 5.0,
    timeout_s: float | None = None,
    startup_s: float = 600.0,
    on_poll: Callable[[], None] | None = None,
    poll_s: float = 0.1,
    name: str = "rank {}",
    world: World | None = None,
    parents: Lender | None = None,
) -> None:
    """Run ``command`` once per rank until all have ended well; whatever happens, none is left when this returns.

    Args:
        command: what each rank executes; ranks are told apart by RANK and the other variables of torchrun.
        log_dir: gets ``rank_N.log`` (stdout and stderr) and the files by which ranks report (optimus_cc.process).
        stop: asks the ranks to end.
        env: variables on top of this process's.
        threads_per_rank: OMP_NUM_THREADS; None: the machine's cores shared out.
        grace_s: how long the other ranks may take to end by themselves after one has failed.
        timeout_s: how long ranks wait for each other. Without any rank's heartbeat for twice as long, and the grace,
            all count as hung; None: never.
        startup_s: the same until every rank has given its first heartbeat, if longer.
        on_poll: called every ``poll_s``.
        name: what a rank is called in messages.
        world: if there are ranks on other hosts, too.
        parents: have processes that fork ranks, if ``command`` runs a module; else every rank is executed.

    Raises:
        RunFailed: a rank failed or hung; names the first one, how it ended, and the last lines of its log;
            OthersMayBeTheCause if the cause need not be here.
        RunCancelled: ``stop`` asked for an end at once.
        RunPreempted: the ranks ended at a step boundary because ``stop`` asked for it.
    """
    supervisor = _Supervisor(log_dir, stop or Stop(), grace_s, on_poll or (lambda: None), poll_s)
    with supervisor:
        supervisor.start(command, num_ranks, env or {}, threads_per_rank, name, world, parents)
        supervisor.watch(timeout_s, startup_s)


class _Supervisor:
    def __init__(self, log_dir: Path, stop: Stop, grace_s: float, on_poll: Callable[[], None], poll_s: float) -> None:
        self.log_dir = log_dir.absolute()
        self.stop = stop
        self.grace_s = grace_s
        self.on_poll = on_poll
        self.poll_s = poll_s
        self.ranks: list[_Rank] = []
        self.asked_to_stop = False

    def __enter__(self) -> _Supervisor:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="optimus_cc_"))
        self.guard = Guard(self.scratch)
        self.line: Line | None = None
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._kill()
        finally:
            if self.line is not None:
                self.line.close()
            self.guard.close()

    def start(
        self,
        command: Sequence[str],
        num_ranks: int,
        env: Mapping[str, str],
        threads: int | None,
        name: str,
        world: World | None,
        parents: Lender | None,
    ) -> None:
        loopback = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or _loopback_interface()}
        own = World(num_ranks, 0, f"file://{self.scratch / 'rendezvous'}")
        shared = {
            **process.SLEEPING_THREADS,
            **os.environ,
            **(loopback if world is None else {}),
            "PYTHONUNBUFFERED": "1",
            **env,
            "WORLD_SIZE": str((world or own).size),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": str(threads or threads_of_each(num_ranks)),
            process.RENDEZVOUS: (world or own).rendezvous,
            process.LOG_DIR: str(self.log_dir),
            process.SUPERVISOR_PID: str(os.getpid()),
        }
        if parents is not None and can_fork(command):
            self._wait_for_parent(parents, shared)
        for local_rank in range(num_ranks):
            number = (world or own).first_rank + local_rank
            for stale in (process.failure_path, process.heartbeat_path):
                stale(self.log_dir, number).unlink(missing_ok=True)
            log = process.log_path(self.log_dir, number)
            with log.open("wb", buffering=0) as output:
                own_environment = {**shared, "RANK": str(number), "LOCAL_RANK": str(local_rank)}
                started = self._start_one(command, own_environment, output)
            self.ranks.append(_Rank(number, name.format(number), started, log, time.time()))
            self.guard.add(started.pid)

    def _wait_for_parent(self, parents: Lender, environment: Mapping[str, str]) -> None:
        """Until it has imported everything, as long as nobody asks for an end."""
        self.line = parents.line(environment)
        while self.line is not None and not (self.line.ready or self.line.broken or self.stop.requested):
            self.line.receive(self.poll_s)
            self.on_poll()

    def _start_one(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Started:
        forked = self.line.fork(command, environment, output) if self.line is not None else None
        return forked or subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def watch(self, timeout_s: float | None, startup_s: float) -> None:
        pulse = _Pulse(timeout_s, startup_s, self.grace_s)
        while self._running():
            self._poll()
            if self.stop.at_once:
                raise RunCancelled(f"cancelled by {self.stop.reason}")
            if self.stop.requested and not self.asked_to_stop:
                self.asked_to_stop = True
                self._signal(signal.SIGTERM)
            if any(self._failed(rank) or self._ended_by_request(rank) for rank in self.ranks):
                self._let_others_end()
                self._raise_verdict()
            pulse.look(self.log_dir, self.ranks)
            if pulse.hung:
                self._raise_hung(f"no rank made progress for {pulse.silent_s:.0f} s", self._running())
            self.on_poll()
            if self._running():
                time.sleep(self.poll_s)
        self._raise_verdict()

    def _running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.ended is None]

    def _failed(self, rank: _Rank) -> bool:
        if rank.failure is not None:
            return True
        return rank.ended is not None and rank.code not in (0, EXIT_PREEMPTED) and not self._ended_by_request(rank)

    def _ended_by_request(self, rank: _Rank) -> bool:
        """Our SIGTERM, or what a scheduler sends to ranks, too, ended it before it had a handler."""
        asked = self.asked_to_stop or self.stop.requested
        numbers = (signal.SIGTERM, signal.SIGUSR2)
        codes = [code for number in numbers for code in (-number, 128 + number)]
        return asked and rank.ended is not None and rank.code in codes

    def _poll(self) -> None:
        for rank in self.ranks:
            if rank.poll(self.log_dir):
                self._kill_group(rank)  # whatever it started and left behind

    def _let_others_end(self) -> None:
        """Give the other ranks time to notice and to write their own tracebacks."""
        deadline = time.monotonic() + self.grace_s
        while self._running() and time.monotonic() < deadline and not self.stop.at_once:
            time.sleep(self.poll_s)
            self._poll()
            self.on_poll()

    def _raise_verdict(self) -> None:
        """Say how the run ended, now that every rank has ended or had its time to. Returns if it ended well."""
        failed = [rank for rank in self.ranks if self._failed(rank)]
        culprits = [rank for rank in failed if not rank.lost_contact]
        silent = [rank for rank in self._running() if rank.failure is None]
        preempted = any(self._ended_by_request(rank) or rank.code == EXIT_PREEMPTED for rank in self.ranks)
        if culprits:
            raise self._failure(min(culprits, key=lambda rank: rank.end_time), failed)
        if preempted:
            raise RunPreempted(f"preempted{f' by {self.stop.reason}' if self.stop.reason else ''}")
        if silent:
            now = time.time()
            quiet_s = max(now - self._last_sign(rank) for rank in silent)
            names = _enumerated([rank.name for rank in silent])
            self._raise_hung(f"{names} did not answer for {quiet_s:.0f} s", silent)
        if failed:
            told = self._failure(min(failed, key=lambda rank: rank.end_time), failed)
            raise OthersMayBeTheCause(told.cause, told.details)

    def _last_sign(self, rank: _Rank) -> float:
        return max(rank.started, process.last_heartbeat(self.log_dir, rank.number) or 0.0)

    def _failure(self, first: _Rank, failed: Sequence[_Rank]) -> RunFailed:
        details = _shown_log(first.log, last_lines(first.log))
        others = [rank.how for rank in failed if rank is not first and not rank.lost_contact and not rank.orphaned]
        if others:
            details += "".join(f"\n  Then {how}." for how in others)
        return RunFailed(first.how, details)

    def _raise_hung(self, cause: str, silent: Sequence[_Rank]) -> None:
        """Have the silent ranks write their stacks before they are killed."""
        sizes = {rank.number: _size(rank.log) for rank in silent}
        self._signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_WAIT_S
        while time.monotonic() < deadline and any(_size(rank.log) == sizes[rank.number] for rank in silent):
            time.sleep(0.05)
        time.sleep(0.2)  # the rest of a dump that has begun
        first = min(silent, key=self._last_sign)
        dump = _read_from(first.log, sizes[first.number])
        if dump:
            details = f"  What {first.name} was doing (the stacks of all silent ranks are in {self.log_dir}):\n"
            details += _indented(_stack_of_main_thread(dump))
        else:
            details = f"  {first.name} did not even write its stack: stopped, or stuck in the kernel.\n"
            details += _shown_log(first.log, last_lines(first.log))
        raise OthersMayBeTheCause(cause, details)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._running():
            with contextlib.suppress(ProcessLookupError):
                rank.started_as.send_signal(number)

    def _kill_group(self, rank: _Rank) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.started_as.pid, signal.SIGKILL)
        if rank.ended is not None:
            self.guard.remove(rank.started_as.pid)

    def _kill(self) -> None:
        for rank in self._running():
            self._kill_group(rank)
        for rank in self._running():
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.started_as.wait(_KILL_WAIT_S)
        self._poll()


class Guard:
    """The helper process that kills groups of processes if this process is killed, and removes its scratch folder."""

    def __init__(self, scratch: Path) -> None:
        script = Path(__file__).with_name("guard.py")
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        self._write(group)

    def remove(self, group: int) -> None:
        self._write(-group)

    def _write(self, number: int) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed the guard; ranks still die with their parent on Linux
            self._popen.stdin.write(f"{number}\n".encode())
            self._popen.stdin.flush()

    def close(self) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        try:
            self._popen.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class _Pulse:
    """Notices when no rank makes progress any more."""

    def __init__(self, timeout_s: float | None, startup_s: float, grace_s: float) -> None:
        self._timeout_s = timeout_s
        self._startup_s = startup_s
        self._grace_s = grace_s
        self._seen: list[float | None] = []
        self._since = self._looked = time.monotonic()
        self.silent_s = 0.0
        self.hung = False

    def look(self, log_dir: Path, ranks: Sequence[_Rank]) -> None:
        now = time.monotonic()
        if self._timeout_s is None or now - self._looked < min(1.0, self._timeout_s / 10):
            return
        self._looked = now
        seen = [rank.ended or process.last_heartbeat(log_dir, rank.number) for rank in ranks]
        if seen != self._seen:
            self._seen, self._since = seen, now
        self.silent_s = now - self._since
        # Twice, because the ranks' own time-outs should come first: they tell which rank it was.
        limit = 2 * self._timeout_s + self._grace_s
        self.hung = self.silent_s > (max(limit, self._startup_s) if None in seen else limit)


def last_lines(log: Path, count: int = LAST_LINES) -> list[str]:
    """The last printed lines of a log, without terminal control and with overlong lines cut."""
    text = _read_from(log, max(0, _size(log) - 64 * 1024))
    lines = [printable(line) for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]


def _read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def printable(line: str) -> str:
    """What a terminal can show of a line that may hold anything."""
    line = line.rstrip("\r").rsplit("\r", 1)[-1]  # what a progress bar showed last
    line = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", line)
    return shortened("".join(character for character in line if character.isprintable() or character == "\t"), 300)


def _stack_of_main_thread(dump: str) -> list[str]:
    """faulthandler writes all threads, the main one last, innermost call first."""
    lines = [printable(line) for line in dump.split("\n")]
    starts = [index for index, line in enumerate(lines) if "hread 0x" in line]
    return lines[starts[-1] if starts else 0 :][:LAST_LINES]


def _shown_log(log: Path, lines: Sequence[str]) -> str:
    return f"  Last lines of {log}:\n{_indented(lines)}" if lines else f"  {log} is empty."


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines if line.strip())


def shortened(text: str, length: int) -> str:
    """At most so many characters, which end in dots if some are left out."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _enumerated(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def threads_of_each(num_ranks: int) -> int:
    """The machine's cores shared out."""
    return max(1, num_cores() // num_ranks)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0] if names else "lo")
