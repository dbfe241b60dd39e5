"""``python -m launchers.processes.parent MODULE...``: imports modules once, then forks processes that need them.

Started, spoken to and ended by :mod:`launchers.processes.preloaded`, which holds the other end of standard input: a
packet there hands over one end of a line. On a line a supervisor asks for processes, and learns how each ended. A
process ends with the supervisor that asked for it, and with this one; this one ends with its owner. It computes
nothing, so that it has one thread when it forks, and a process begins as a fresh interpreter would after its imports.
Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from optimus_cc import process

OF_ONE_START = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        process.RENDEZVOUS,
        process.DEVICE,
        process.LOG_DIR,
        process.SUPERVISOR_PID,
    }
)
"""Variables that are read after the imports, and so may differ from this process's."""
PACKET = 2**20
"""More bytes than a packet has: the system's buffers hold less."""
_REACTIONS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class _Order:
    """What a forked process is to become."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    output: int
    """File descriptor for what it prints."""


class Mismatch(Exception):
    """A process would not begin as one that is executed does; says why."""


class _Start:
    """What this process began with; what a forked process begins with has to be the same."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.place = os.getcwd()
        self.code = _code()
        self.reactions = {number: signal.getsignal(number) for number in _REACTIONS}

    def check(self, environment: dict[str, str], place: str) -> None:
        """Raises:
        Mismatch: another environment or folder, or code that has changed since.
        """
        mine, asked = _of_imports(self.environment), _of_imports(environment)
        if mine != asked:
            names = sorted(name for name in mine.keys() | asked.keys() if mine.get(name) != asked.get(name))
            raise Mismatch(f"another environment: {', '.join(names)}")
        if place != self.place:
            raise Mismatch(f"another folder: {place}")
        if _code() != self.code:
            raise Mismatch("the code has changed")


def _of_imports(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_ONE_START}


def _code() -> dict[str, tuple[int, int]]:
    """When the files of this package were last written, and their sizes."""
    states = {}
    for path in Path(process.__file__).parent.rglob("*.py"):
        with contextlib.suppress(FileNotFoundError):
            state = path.stat()
            states[str(path)] = (state.st_mtime_ns, state.st_size)
    return states


class _Server:
    """Forks on request, until the owner goes; everything that it forked is gone then."""

    def __init__(self, owner: socket.socket, start: _Start) -> None:
        self._owner = owner
        self._start = start
        self._children: dict[socket.socket, set[int]] = {}
        """Of each line."""
        self._wake, self._waker = os.pipe()
        for descriptor in (self._wake, self._waker):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def serve(self) -> _Order | None:
        """In a forked process, what it is to become; in this one None, at the end."""
        while True:
            sources: list[socket.socket | int] = [self._owner, self._wake, *self._children]
            ready, _, _ = select.select(sources, [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._wake, 4096):
                        pass
            self._report_ends()
            for line in [line for line in self._children if line in ready]:
                if (order := self._answer(line)) is not None:
                    return order
            if self._owner in ready and not self._take_line():
                for line in list(self._children):
                    self._drop(line)
                return None

    def _take_line(self) -> bool:
        """Returns whether the owner is still there."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._owner, PACKET, 1)
        except OSError:
            return False
        for descriptor in descriptors:
            line = socket.socket(fileno=descriptor)
            line.setblocking(False)
            self._children[line] = set()
            self._tell(line, {"ready": True})
        return bool(data)

    def _report_ends(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for line, children in list(self._children.items()):
                if pid in children:
                    children.remove(pid)
                    self._tell(line, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, line: socket.socket, message: dict[str, Any]) -> None:
        try:
            line.send(json.dumps(message).encode())
        except OSError:  # nobody is there, or nobody has been reading for hundreds of messages
            self._drop(line)

    def _drop(self, line: socket.socket) -> None:
        """Whoever asked for these processes is gone."""
        line.close()
        for pid in self._children.pop(line, ()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _answer(self, line: socket.socket) -> _Order | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(line, PACKET, 1)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._drop(line)
            return None
        request = json.loads(data)
        environment = request["environment"]
        try:
            self._start.check(environment, request["place"])
        except Mismatch as mismatch:
            self._tell(line, {"refused": str(mismatch)})
        else:
            order = _Order(request["module"], request["arguments"], environment, descriptors[0])
            if self._fork(line, order):
                return order
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _fork(self, line: socket.socket, order: _Order) -> bool:
        """Returns whether this is the forked process."""
        begun, begins = os.pipe()
        # What is sent to the new process before it can react as it should waits until it does.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            process.end_with(me)
            os.close(begins)
            os.close(begun)
            self._let_go()
            _become(order, self._start.environment, me)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return True
        alone = _has_one_thread()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(begins)
        os.read(begun, 1)
        os.close(begun)
        if not alone:  # another thread may have held a lock that nobody in the new process will ever let go
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._tell(line, {"refused": "several threads"})
            return False
        self._children[line].add(pid)
        self._tell(line, {"started": pid})
        return False

    def _let_go(self) -> None:
        """In a forked process: leave to the parent what is its own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, reaction in self._start.reactions.items():
            signal.signal(number, reaction)
        for other in (self._owner, *self._children):
            other.close()
        for descriptor in (self._wake, self._waker):
            os.close(descriptor)


def _has_one_thread() -> bool:
    """Whether it had just before: a library that ends its threads for a fork has them listed a moment longer."""
    for _ in range(100):
        if len(os.listdir("/proc/self/task")) == 1:
            return True
        time.sleep(0.001)
    return False


def _become(order: _Order, before: dict[str, str], parent: int) -> None:
    """Take the input, output and environment that this process would have if it had been executed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (order.output, 1), (order.output, 2)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(order.output)
    # What imports have changed in the environment stays: they would have done it there, too.
    for name in before.keys() - order.environment.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in order.environment.items() if before.get(name) != value})
    os.environ[process.SUPERVISOR_PID] = str(parent)


def main(modules: list[str]) -> None:
    start = _Start()
    for number in _REACTIONS:  # a scheduler sends them to everybody; they are meant for what is forked
        signal.signal(number, signal.SIG_IGN)
    process.die_with_parent()
    owner = socket.socket(fileno=os.dup(0))
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages that nobody writes to stay shared
    order = _Server(owner, start).serve()
    if order is not None:
        _run(order)


def _run(order: _Order) -> NoReturn:
    """As ``python -m MODULE ARGUMENTS``, but for taking the modules apart at the end, which takes half a second."""
    sys.argv[1:] = order.arguments
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # of modules that are imported, too
    code = 0
    try:
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    process.leave_at_once(code)


if __name__ == "__main__":
    main(sys.argv[1:])
