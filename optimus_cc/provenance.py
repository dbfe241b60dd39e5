"""Where a run came from: the code's commit and its uncommitted changes, versions, machine, person, command."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optimus_cc.records import read_json_object, replace_file, to_json

_COPY_MARK = "code_version.json"
PACKAGES = (
    "optimus-cc",
    "torch",
    "megatron-core",
    "transformer-engine",
    "triton",
    "numpy",
    "hydra-core",
    "omegaconf",
    "pydantic",
    "tokenizers",
    "wandb",
)
"""Whose versions are recorded, where installed."""


def utc_now() -> str:
    """ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class CodeVersion:
    """State of the repository that the code runs from."""

    commit: str | None = None
    """None: the code isn't in a repository, or nothing was committed yet."""
    dirty: bool = False
    diff: str = ""
    """Uncommitted changes of tracked files."""
    untracked: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{(self.commit or 'unknown')[:10]}{' with uncommitted changes' if self.dirty else ''}"


def code_version() -> CodeVersion:
    """State of the repository that this file is tracked in, or was when it was copied (:func:`mark_copy`)."""
    source = Path(__file__).resolve()
    if (copied := read_json_object(source.parent.parent / _COPY_MARK)) is not None:
        return CodeVersion(copied.get("commit"), bool(copied.get("dirty")), str(copied.get("diff", "")))
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return CodeVersion()  # installed from a wheel, perhaps inside somebody else's repository
    root = source.parent.parent
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    diff = _git(root, "diff", "--no-color", "--no-ext-diff", "HEAD") or ""
    untracked = tuple((_git(root, "ls-files", "--others", "--exclude-standard") or "").splitlines())
    return CodeVersion(commit and commit.strip(), bool(diff or untracked), diff, untracked)


def mark_copy(folder: Path, code: CodeVersion) -> None:
    """Say in a copy of the code which state of the repository it is a copy of."""
    record = {"commit": code.commit, "dirty": code.dirty, "diff": code.diff}
    replace_file(folder / _COPY_MARK, to_json(record, indent=2) + "\n")


def collect(code: CodeVersion) -> dict[str, Any]:
    """Everything but the diff, ready for provenance.json."""
    return {
        "created": utc_now(),
        **of_code(code),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": installed_versions(),
        "host": socket.gethostname(),
        "user": _user(),
        "command": shlex.join([sys.executable, *sys.argv]),
        "working_directory": os.getcwd(),
    }


def of_code(code: CodeVersion) -> dict[str, Any]:
    return {"git": {"commit": code.commit, "dirty": code.dirty, "untracked": list(code.untracked[:100])}}


def installed_versions() -> dict[str, str]:
    """Versions of :data:`PACKAGES`, read from their metadata; nothing is imported."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if it failed."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=60,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode("utf-8", errors="replace")


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None  # a container whose user id has no name
