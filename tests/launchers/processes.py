"""Scripts that stand in for ranks, and a look at what is left of them."""

from __future__ import annotations

import os
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
"""For waiting loops only; nothing takes this long."""

_PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from optimus_cc.process import Report, die_with_parent, install_stack_dump
RANK = int(os.environ["RANK"])
report = Report.from_environment()

def wait_for(name):
    while not (Path(os.environ["OPTIMUS_CC_LOG_DIR"]) / name).exists():
        time.sleep(0.01)

def lose_contact():
    report.failed(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    sys.exit(1)
"""


def rank_command(script: str) -> list[str]:
    """A rank that runs ``script`` after some imports and definitions."""
    return [sys.executable, "-S", "-c", _PRELUDE + textwrap.dedent(script)]


def module_command(script: str) -> list[str]:
    """The same as a module, which can be forked, too."""
    return [sys.executable, "-m", "tests.launchers.scripted", _PRELUDE + textwrap.dedent(script)]


def marked_environment() -> dict[str, str]:
    """Environment for ranks; everything they start inherits its mark."""
    return {"PYTHONPATH": str(ROOT), "TEST_MARK": uuid.uuid4().hex}


def survivors(mark: str) -> list[str]:
    """Command lines of living processes that carry a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().decode(errors="replace")[-80:])
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def assert_none_left(mark: str) -> None:
    eventually(lambda: not survivors(mark), f"every process gone; left: {survivors(mark)}")
