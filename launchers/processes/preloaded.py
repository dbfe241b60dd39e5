"""Parents that have imported what ranks need, as their owner and the supervisors of ranks see them.

Importing torch and Megatron-core takes seconds of processor time; forking a process that has takes milliseconds. A
parent (:mod:`launchers.processes.parent`) is of use where everything that the imports depend on is the same: the
environment, the folder and the code. :class:`Parents` has one for each environment; a sweep lends them to its jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from launchers.processes.parent import OF_ONE_START, PACKET
from optimus_cc import process

MODULES = ("optimus_cc.training.preload",)
"""What ranks on the CPU need."""
LENT = "OPTIMUS_CC_PARENTS"
"""File descriptor through which a job reaches the parents of its sweep."""
_ANSWER_S = 60.0
_CLOSE_S = 10.0


class Started(Protocol):
    """A process that was started, whoever its parent is; as :class:`subprocess.Popen`."""

    pid: int

    @property
    def returncode(self) -> int | Any: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


class Forked:
    """A process that a parent forked."""

    def __init__(self, line: Line, pid: int) -> None:
        self._line = line
        self.pid = pid
        self.returncode: int | None = None
        self.orphaned = False
        """The parent died, and the process with it."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal, or None while it runs."""
        self._line.receive(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises:
        subprocess.TimeoutExpired: it still runs.
        """
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while self.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._line.receive(min(left, 1.0))
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class Line:
    """Connects a supervisor with a parent. When it is closed the parent kills what it forked for it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._forked: dict[int, Forked] = {}
        self._answer: dict[str, Any] | None = None
        self.ready = False
        """The parent has imported everything."""
        self.broken = False
        """There is no parent any more."""
        self.refused = ""
        """Why the parent forked nothing."""

    def receive(self, timeout_s: float) -> None:
        """Take what the parent has to say, after waiting for it for so long at most."""
        while not self.broken and select.select([self._end], [], [], timeout_s)[0]:
            timeout_s = 0.0
            try:
                data = self._end.recv(PACKET)
            except OSError:
                data = b""
            if not data:
                self._break()
                return
            message = json.loads(data)
            if "ready" in message:
                self.ready = True
            elif "ended" in message:
                self._forked.pop(message["ended"]).returncode = message["code"]
            else:
                self._answer = message

    def _break(self) -> None:
        self.broken = True
        for forked in self._forked.values():
            forked.returncode, forked.orphaned = -signal.SIGKILL, True
        self._forked.clear()

    def fork(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Forked | None:
        """A process that does what ``command`` would if it were executed here; None if it must be executed.

        Args:
            output: its stdout and stderr.
        """
        if not self.ready or self.broken:
            return None
        request = {
            "module": command[2],
            "arguments": list(command[3:]),
            "environment": dict(environment),
            "place": os.getcwd(),
        }
        self._answer = None
        try:
            socket.send_fds(self._end, [json.dumps(request).encode()], [output.fileno()])
        except OSError:  # it is gone, or the environment is too large for a packet
            return None
        deadline = time.monotonic() + _ANSWER_S
        while self._answer is None and not self.broken:
            if time.monotonic() > deadline:  # stopped, perhaps
                self.close()
                return None
            self.receive(1.0)
        if self._answer is None or "started" not in self._answer:
            self.refused = (self._answer or {}).get("refused", "the parent ended")
            return None
        forked = Forked(self, self._answer["started"])
        self._forked[forked.pid] = forked
        return forked

    def close(self) -> None:
        self._break()
        self._end.close()


def can_fork(command: Sequence[str]) -> bool:
    """Whether a parent could do what a command says: run a module in this very Python."""
    return sys.platform == "linux" and len(command) > 2 and list(command[:2]) == [sys.executable, "-m"]


class Lender(Protocol):
    """Gives lines to parents."""

    def line(self, environment: Mapping[str, str]) -> Line | None:
        """To a parent for such processes; it may be starting."""


class Parents:
    """The parents that this process owns; there is one as soon as somebody needs it. To be used in one thread."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._modules = modules
        self._parents: dict[str, _Parent] = {}
        self._borrowers: list[socket.socket] = []

    def __enter__(self) -> Parents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def line(self, environment: Mapping[str, str]) -> Line | None:
        ours, theirs = _pair()
        with theirs:
            self._connect(dict(environment), os.getcwd(), theirs)
        return Line(ours)

    def _connect(self, environment: dict[str, str], place: str, end: socket.socket) -> None:
        shared = {name: value for name, value in environment.items() if name not in OF_ONE_START}
        key = json.dumps([place, sorted(shared.items())])
        parent = self._parents.get(key)
        if parent is None or not parent.alive:
            if parent is not None:
                parent.close()
            parent = self._parents[key] = _Parent(shared, place, self._modules)
        with contextlib.suppress(OSError):  # it is gone; whoever has the other end finds that out
            socket.send_fds(parent.control, [b"line"], [end.fileno()])

    def lend(self) -> socket.socket:
        """What a job is to inherit, and to be told of by :data:`LENT`; for the caller to close."""
        ours, theirs = _pair()
        self._borrowers.append(ours)
        return theirs

    def serve(self) -> None:
        """Connect the jobs that ask for it. Does not wait."""
        for borrower in select.select(self._borrowers, [], [], 0.0)[0]:
            try:
                data, descriptors, _, _ = socket.recv_fds(borrower, PACKET, 1)
            except OSError:
                data, descriptors = b"", []
            if data:
                wanted = json.loads(data)
                self._connect(wanted["environment"], wanted["place"], end := socket.socket(fileno=descriptors[0]))
                end.close()
            else:
                borrower.close()
                self._borrowers.remove(borrower)

    def close(self) -> None:
        """End them, and all that they forked."""
        for borrower in self._borrowers:
            borrower.close()
        self._borrowers.clear()
        for parent in self._parents.values():
            parent.close()
        self._parents.clear()


class _Parent:
    def __init__(self, environment: dict[str, str], place: str, modules: Sequence[str]) -> None:
        self.control, theirs = _pair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "launchers.processes.parent", *modules],
                env={**environment, process.SUPERVISOR_PID: str(os.getpid())},
                cwd=place,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a rank that is executed fails at the same import, and tells
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def close(self) -> None:
        self.control.close()
        try:
            self._popen.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class Borrowed:
    """The parents of the sweep that started this job."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def here(cls) -> Borrowed | None:
        """From the environment, which forgets them: they are not for what this process starts."""
        descriptor = os.environ.pop(LENT, None)
        if descriptor is None:
            return None
        end = socket.socket(fileno=int(descriptor))
        end.set_inheritable(False)
        return cls(end)

    def line(self, environment: Mapping[str, str]) -> Line | None:
        ours, theirs = _pair()
        request = {"environment": dict(environment), "place": os.getcwd()}
        with theirs:
            try:
                socket.send_fds(self._end, [json.dumps(request).encode()], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        return Line(ours)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Packets keep their bounds."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
