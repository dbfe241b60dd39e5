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
    """This process's, without what an allocation around it says about itself."""
    allocation = re.compile(r"SLURM_|SBATCH_|SRUN_|SALLOC_|SLURMD_|SUBMITIT_|PMI_|PMIX_|CUDA_VISIBLE_DEVICES$|ROCR_")
    return {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not allocation.match(name)}


def is_installed() -> bool:
    return shutil.which("sbatch") is not None


def sbatch(script: Path, *options: str) -> str:
    """Submit a script.

    Returns:
        the job's id.

    Raises:
        SlurmError: SLURM refused it.
    """
    answer = _run(["sbatch", "--parsable", *options, str(script)], clean_environment())
    return answer.strip().partition(";")[0]


def test(script: Path) -> None:
    """Ask whether a script could ever run.

    Raises:
        SlurmError: it couldn't; says why.
    """
    _run(["sbatch", "--test-only", str(script)], clean_environment())


def max_array_size() -> int:
    """Jobs of one array at most; SLURM's default if it can't be asked."""
    try:
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]), re.MULTILINE)
    except SlurmError:
        found = None
    return int(found[1]) if found else _DEFAULT_MAX_ARRAY_SIZE


def jobs(ids: Iterable[str]) -> dict[str, Job]:
    """How jobs stand, in one query of the queue and, for those that it has forgotten, one of the accounting, if there
    is any. Jobs that nobody knows any more are left out.

    Args:
        ids: of jobs; ``12_3`` of an array's.

    Raises:
        SlurmError: the queue doesn't answer.
    """
    wanted = set(ids)
    if not wanted:
        return {}
    arrays = ",".join(sorted({one.partition("_")[0] for one in wanted}))
    try:
        text = _run(["squeue", "--noheader", "--array", "--states=all", f"--jobs={arrays}", "--format=%i|%A|%T|%r|%N"])
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        text = ""
    found = {}
    for line in text.splitlines():
        name, number, state, reason, nodes = (*line.split("|"), "", "", "", "")[:5]
        for one in (name, number):
            if one in wanted:
                found[one] = Job(state, "" if reason == "None" else reason, nodes)
    if wanted - found.keys():
        found |= _accounted(wanted - found.keys())
    return found


def _accounted(wanted: set[str]) -> dict[str, Job]:
    arrays = ",".join(sorted({one.partition("_")[0] for one in wanted}))
    command = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={arrays}"]
    try:
        text = _run([*command, "--format=JobID,State,NodeList"])
    except SlurmError:  # no accounting on this cluster
        return {}
    found = {}
    for line in text.splitlines():
        name, state, nodes = (*line.split("|"), "", "")[:3]
        if name in wanted and state:
            found[name] = Job(state.split()[0].rstrip("+"), nodes=nodes)  # CANCELLED by 0
    return found


def show(job_id: str) -> Mapping[str, str]:
    """What the controller says about one job, by its names.

    Raises:
        SlurmError: it doesn't know the job, or doesn't answer.
    """
    text = _run(["scontrol", "--oneliner", "show", "job", job_id])
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


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


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on this machine: is it one of the cluster's?") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise SlurmError("; ".join(said[-2:]) or f"{command[0]} exited with code {done.returncode}")
    return done.stdout
