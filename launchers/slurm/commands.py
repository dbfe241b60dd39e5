"""SLURM's commands, and what they answer. Nothing here raises anything but :class:`SlurmError`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 60.0
_DEFAULT_MAX_ARRAY_SIZE = 1001
_NOT_OURS = re.compile(
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SCONTROL|SACCT|SINFO|SUBMITIT|PMI|PMIX|ROCR)_|CUDA_VISIBLE_DEVICES$"
)
_KEPT = ("SLURM_CONF", "SLURM_JWT")
"""Which cluster it is, and by which token it knows the user."""
_DEFAULTS = {
    "SBATCH_PARTITION": "launcher.partition",
    "SBATCH_ACCOUNT": "launcher.account",
    "SBATCH_QOS": "launcher.qos",
    "SBATCH_CONSTRAINT": "launcher.constraint",
}
_UNKNOWN_JOB = "Invalid job id"
_THERE = ("allocated", "completing", "idle", "mixed")
LIVE = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "SIGNALING",
        "STAGE_OUT",
        "RESIZING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    ]
)
"""States of a job that isn't over. NODE_FAIL and PREEMPTED are not among them: what SLURM requeues is PENDING."""


class SlurmError(Exception):
    """A command failed, or there is none. ``str()`` says what SLURM said."""


@dataclass(frozen=True)
class Job:
    """How SLURM says a job stands."""

    state: str
    """``RUNNING``, ``TIMEOUT`` and so on."""
    reason: str = ""
    """Why it waits."""
    nodes: str = ""

    @property
    def live(self) -> bool:
        return self.state in LIVE


def clean_environment() -> dict[str, str]:
    """This process's, without what an allocation around it says about itself, and without what the user's shell says to
    SLURM's commands: what they do and answer is decided by what they are asked."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or not _NOT_OURS.match(name)}


def unused_defaults() -> dict[str, str]:
    """Variables by which this shell chooses for sbatch, and the keys that do it here."""
    return {name: key for name, key in _DEFAULTS.items() if os.environ.get(name)}


def is_installed() -> bool:
    return shutil.which("sbatch") is not None


def is_up() -> bool:
    """Whether one of the cluster's controllers answers."""
    try:
        return " is UP" in _run(["scontrol", "ping"])
    except SlurmError as error:  # also if another one is down
        return " is UP" in str(error)


def sbatch(script: Path, *options: str) -> str:
    """Submit a script.

    Returns:
        the job's id.

    Raises:
        SlurmError: SLURM refused it.
    """
    return _job_id(_run(["sbatch", "--parsable", *options, str(script)]))


def test(script: str) -> str | None:
    """Ask whether a script could ever run.

    Returns:
        None: it could run now; or why it can't before nodes come back, if SLURM takes it into the queue all the same.

    Raises:
        SlurmError: it couldn't; says why.
    """
    try:
        _run(["sbatch", "--test-only"], script)
    except SlurmError as error:
        # SLURM doesn't tell what can't run now from what can't ever: with all nodes there it is the latter.
        if not _nodes_are_away():
            raise
        cancel([_job_id(_run(["sbatch", "--parsable", "--hold", "--mail-type=NONE"], script))])
        return str(error)
    return None


def _job_id(answer: str) -> str:
    return answer.strip().partition(";")[0]


def _nodes_are_away() -> bool:
    """Whether there are nodes that are drained or down, or that have not registered (yet)."""
    try:
        return any(state not in _THERE for state in _run(["sinfo", "--noheader", "--Node", "--format=%T"]).split())
    except SlurmError:
        return False


def max_array_size() -> int:
    """Jobs of one array at most; SLURM's default if it can't be asked."""
    try:
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]), re.MULTILINE)
    except SlurmError:
        found = None
    return int(found[1]) if found else _DEFAULT_MAX_ARRAY_SIZE


def jobs(ids: Iterable[str]) -> dict[str, Job]:
    """How jobs stand, in one query of the queue. An empty answer is no proof, so the controller is asked again for
    those that are not in it, and then the accounting, if there is any. Jobs that none of them knows are left out.

    Args:
        ids: of jobs; ``12_3`` of an array's.

    Raises:
        SlurmError: the controller doesn't answer.
    """
    wanted = set(ids)
    if not wanted:
        return {}
    found = _queued(wanted)
    for ask in (_shown, _accounted):
        if wanted - found.keys():
            found |= ask(wanted - found.keys())
    return found


def _arrays_of(ids: Iterable[str]) -> list[str]:
    return sorted({one.partition("_")[0] for one in ids})


def _queued(wanted: set[str]) -> dict[str, Job]:
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%A|%T|%r|%N"]
    text = _run_unless_unknown([*command, f"--jobs={','.join(_arrays_of(wanted))}"])
    found = {}
    for line in text.splitlines():
        name, number, state, reason, nodes = (*line.split("|"), "", "", "", "")[:5]
        for one in (name, number):
            if one in wanted:
                found[one] = Job(state, "" if reason == "None" else reason, nodes)
    return found


def _shown(wanted: set[str]) -> dict[str, Job]:
    found: dict[str, Job] = {}
    for array in _arrays_of(wanted):
        for line in _run_unless_unknown(["scontrol", "--oneliner", "show", "job", array]).splitlines():
            told = _fields(line)
            names = [f"{told.get('ArrayJobId')}_{index}" for index in _indices(told.get("ArrayTaskId", ""))]
            values = [told.get(name, "") for name in ("JobState", "Reason", "NodeList")]
            job = Job(*("" if value in ("None", "(null)") else value for value in values))
            found |= {name: job for name in (*names, told.get("JobId", "")) if name in wanted and job.state}
    return found


def _indices(text: str) -> list[int]:
    """Of jobs of an array, as the controller writes them: ``0-2,5,7-11:2%4``."""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            found += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
    return found


def _accounted(wanted: set[str]) -> dict[str, Job]:
    command = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(_arrays_of(wanted))}"]
    try:
        text = _run([*command, "--format=JobID,State,NodeList"])
    except SlurmError:  # no accounting on this cluster
        return {}
    found = {}
    for line in text.splitlines():
        name, state, nodes = (*line.split("|"), "", "")[:3]
        array, _, waiting = name.partition("_[")
        for one in (name, *(f"{array}_{index}" for index in _indices(waiting.rstrip("]")))):
            if one in wanted and state:
                found[one] = Job(state.split()[0].rstrip("+"), nodes=nodes)  # CANCELLED by 0
    return found


def show(job_id: str) -> Mapping[str, str]:
    """What the controller says about one job, by its names.

    Raises:
        SlurmError: it doesn't know the job, or doesn't answer.
    """
    return _fields(_run(["scontrol", "--oneliner", "show", "job", job_id]))


def _fields(line: str) -> dict[str, str]:
    """A job's line of the controller's. Paths and comments, which may hold anything, come after what is read here."""
    found: dict[str, str] = {}
    for word in line.split():
        name, equals, value = word.partition("=")
        if equals:
            found.setdefault(name, value)
    return found


def requeue(job_id: str) -> None:
    """Have a job start again, whatever it does now.

    Raises:
        SlurmError: SLURM refused.
    """
    _run(["scontrol", "requeue", job_id])


def wait_for(job_id: str, others: Sequence[str]) -> None:
    """Let a job that waits begin when others have ended, and not before.

    Raises:
        SlurmError: SLURM refused.
    """
    _run(["scontrol", "update", f"JobId={job_id}", f"Dependency=afterany:{':'.join(others)}"])


def cancel(ids: Sequence[str]) -> None:
    """End jobs.

    Raises:
        SlurmError: SLURM doesn't answer. Jobs that are over are no error.
    """
    if ids:
        _run(["scancel", "--quiet", *ids])


def _run(command: Sequence[str], text: str | None = None) -> str:
    """What a command prints; ``text``: what it reads."""
    env = {**clean_environment(), "SLURM_BITSTR_LEN": "0"} if command[0] == "scontrol" else clean_environment()
    try:
        done = subprocess.run(command, env=env, input=text, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on this machine: is it one of the cluster's?") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise SlurmError("; ".join(said[-2:]) or f"{command[0]} exited with code {done.returncode}")
    return done.stdout


def _run_unless_unknown(command: Sequence[str]) -> str:
    """The same; nothing if it says that there is no such job."""
    try:
        return _run(command)
    except SlurmError as error:
        if _UNKNOWN_JOB not in str(error):
            raise
        return ""
