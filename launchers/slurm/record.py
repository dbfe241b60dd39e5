"""Which job of SLURM a run belongs to. ``slurm.json`` in the run's folder names its line in a submission, and the
submission's folder, ``RUNS_DIR/.slurm/HASH``, the ids of its arrays: so nothing has to be written into a run's folder
after its job is submitted, when it may have begun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from optimus_cc.files import read_text
from optimus_cc.records import read_json_object, replace_file, to_json
from optimus_cc.runs import SCHEDULER_RECORD, RunFolder

FOLDER = ".slurm"
"""In a folder of runs: what was submitted."""


@dataclass(frozen=True)
class Record:
    """A run's job."""

    runs: str
    """The file that lists the runs of its array."""
    index: int
    """Its line there, and its number in the array."""
    restarts_before: int = 0
    """Attempts at the run that were over when it was submitted."""
    job_id: str | None = None
    """If it isn't its array's any more: it was submitted once more."""
    unbegun: int = 0
    """How often its job was asked to end before this project's code had begun."""
    stop: bool = False
    """Somebody wants it to end and not to go on."""
    pid: int | None = None
    host: str | None = None
    """The process that runs the newest attempt, or has run it."""

    @property
    def id(self) -> str | None:
        """``12_3``; None: it has no id yet."""
        if self.job_id is not None:
            return self.job_id
        try:
            return f"{read_text(id_path(Path(self.runs))).strip()}_{self.index}"
        except OSError:
            return None

    @property
    def output(self) -> Path:
        """What its job prints before it has claimed the run's folder."""
        return output_path(Path(self.runs), self.index)

    @property
    def see(self) -> str:
        """Where it stands why its job ended before the run began."""
        return f"see {self.output}" if self.output.exists() else f"it printed nothing; see scontrol show job {self.id}"


def output_path(runs: Path, index: int | str) -> Path:
    """Where the output of an array's job stands."""
    return runs.with_name(f"{runs.stem}_{index}.out")


def id_path(runs: Path) -> Path:
    """Where an array's id stands."""
    return runs.with_suffix(".job")


def write_runs(runs: Path, folders: Sequence[RunFolder]) -> None:
    """The list of an array's runs."""
    replace_file(runs, "".join(f"{folder.path}\n" for folder in folders))


def read_runs(runs: Path) -> list[RunFolder]:
    return [RunFolder(line) for line in read_text(runs).splitlines()]


def path(folder: RunFolder) -> Path:
    return folder.path / SCHEDULER_RECORD


def read(folder: RunFolder) -> Record | None:
    """None: SLURM has nothing to do with this run. Never raises."""
    found = read_json_object(path(folder))
    if found is None:
        return None
    known = {field.name: found[field.name] for field in fields(Record) if found.get(field.name) is not None}
    numbers = dict.fromkeys(("index", "restarts_before", "unbegun", "pid"), int)
    kinds = {"runs": str, "job_id": str, "host": str, "stop": bool, **numbers}
    if any(not isinstance(value, kinds[name]) for name, value in known.items()):
        return None
    return Record(**known) if known.keys() >= {"runs", "index"} else None


def write(folder: RunFolder, record: Record) -> None:
    replace_file(path(folder), to_json(asdict(record), indent=2) + "\n")


def remove(folder: RunFolder) -> None:
    path(folder).unlink(missing_ok=True)


def this_process() -> dict[str, object]:
    return {"pid": os.getpid(), "host": os.uname().nodename}
