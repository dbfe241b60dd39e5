"""The rules by which a run's folder is started, queued, kept or refused; see :mod:`optimus_cc.runs` for what is in it.

Nothing is deleted: what an attempt left moves to ``attempts/``, finished results that are to be made again to
``previous/``. One process at a time has a folder, also among hosts (:mod:`optimus_cc.ownership`).
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from optimus_cc import checkpoints, ownership, provenance
from optimus_cc.config.identity import without_dead_keys
from optimus_cc.files import read_text
from optimus_cc.ownership import STALE_S, Held, Ownership
from optimus_cc.provenance import utc_now
from optimus_cc.records import from_json, replace_file, to_json
from optimus_cc.runs import FAILURES, SCHEDULER_RECORD, RunBusy, RunConflict, RunFailed, RunFolder, Status

if TYPE_CHECKING:
    from optimus_cc.config import RunConfig


@dataclass
class Claim:
    """The right to run one id. Use it in a ``with`` statement: others are locked out until it ends."""

    folder: RunFolder
    status: Status
    finished: bool = False
    """A finished run is there and nothing is to be done."""
    notes: tuple[str, ...] = ()
    """What was found and what was done about it, a line each."""
    _lock: Ownership | None = None

    def update(self, **changes: Any) -> None:
        """Change fields of the status, in the folder too.

        Raises:
            RunBusy: this process was silent for so long that another one has taken the run over.
        """
        if self._lock is not None:
            try:
                self._lock.renew()
            except Held as held:
                raise RunBusy(f"{self.folder.run_id} was taken over by {held}: nothing was heard from here") from None
        self.status = self.folder.write_status(replace(self.status, **changes))

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def claim(config: RunConfig) -> Claim:
    """Take the folder of a configuration, by the rules for folders that are there already.

    A finished run is not run again unless ``config.force``; then its results move to ``previous/``. An unfinished one
    starts again; its logs and metrics move to ``attempts/``. Nothing is deleted.

    Raises:
        RunBusy: another process runs it; the message says which.
        RunConflict: the folder holds another configuration under the same id.
        RunFailed: the folder can't be written.
    """
    return _take(config, provenance.code_version(), _start)


def queue(config: RunConfig, code: provenance.CodeVersion | None = None, *, anew: bool = False) -> Claim:
    """Freeze a configuration in its folder for a job that starts later (:func:`claim_queued`), by the rules of
    :func:`claim`. What another living process has queued stays as that process froze it.

    Args:
        code: the state of the repository, if it is known already.
        anew: freeze it also then, for a job that would not run what is there.

    Returns:
        ``finished`` and the notes; it holds no lock.

    Raises:
        as :func:`claim`.
    """
    claimed = _take(config, code or provenance.code_version(), _freeze if anew else _put_in_queue)
    claimed.release()
    return claimed


def claim_queued(folder: RunFolder, config: RunConfig) -> Claim:
    """Take a folder that :func:`queue` has prepared; ``config`` is what :meth:`RunFolder.run_config` read from it.

    Returns:
        the claim; ``finished`` if another process was quicker and is through.

    Raises:
        RunBusy: another process runs it.
        RunCancelled: somebody has cancelled it meanwhile.
        RunConflict: what it computes has changed since it was queued: a file has.
        RunFailed: it was started and ended otherwise; or the folder can't be written.
    """
    with _writing(folder):
        lock = _lock(folder)
        try:
            status = folder.status()
            if status is None or status.state not in ("queued", "finished"):
                raise _not_queued(folder, status)
            if status.state == "finished":
                lock.release()
                return Claim(folder, status, finished=True, notes=(f"{folder.run_id} is finished already",))
            check_same_experiment(folder, config)
            claimed = Claim(folder, status, notes=_code_has_changed(folder), _lock=lock)
            _begin(claimed)
            return claimed
        except BaseException:
            lock.release()
            raise


def withdraw(folder: RunFolder, state: Literal["cancelled", "failed"], cause: str) -> bool:
    """Take a run out of the queue; ``False`` if it isn't queued any more. It doesn't count as an attempt.

    Raises:
        RunFailed: the folder can't be written.
    """
    with _writing(folder):
        try:
            lock = _lock(folder)
        except RunBusy:
            return False
        try:
            status = folder.status()
            if status is None or status.state != "queued":
                return False
            folder.write_status(replace(status, state=state, cause=cause))
            return True
        finally:
            lock.release()


def folder_of(config: RunConfig) -> RunFolder:
    """Where the run of ``config`` is, or will be: under its id, or under the one that it had before, if it is there."""
    base = Path(config.runs_dir).absolute()
    now, *before = [RunFolder(base / run_id) for run_id in config.run_ids]
    return next((folder for folder in (now, *before) if folder.exists()), now)


def check_same_experiment(folder: RunFolder, config: RunConfig) -> None:
    """A folder's name holds a short hash only, and folders can be copied or edited.

    Raises:
        RunConflict: it holds something else than a run of ``config``, or a run that computes something else.
    """
    there = _recorded_science(folder)
    here = from_json(to_json(config.scientific()))
    if there is None or there == here:
        return
    differences = sorted(_differences(there, here))
    raise RunConflict(
        f"{folder.path} holds another experiment under the same id",
        "\n".join(f"    {line}" for line in differences[:10]) + "\n  Move that folder away, or set runs_dir=FOLDER.",
    )


def _not_queued(folder: RunFolder, status: Status | None) -> RunFailed:
    if status is None:
        return RunFailed(f"{folder.run_id} is not queued: it has no status")
    cause = f" ({status.cause})" if status.cause else ""
    kind = FAILURES.get(status.state, RunFailed)
    return kind(f"{folder.run_id} is not started: it is not queued but {status.state}{cause}")


@contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailed(f"the run folder {folder.path} can't be written: {error.strerror or error}") from error


def _take(
    config: RunConfig,
    code: provenance.CodeVersion,
    prepare: Callable[[RunFolder, RunConfig, provenance.CodeVersion, Ownership], Claim],
) -> Claim:
    """What ``prepare`` makes of the configuration's folder under its lock; a claim on a finished run, if there is one.
    ``prepare`` must not close the lock."""
    folder = folder_of(config)
    with _writing(folder):
        if not config.force and (done := _finished(folder, config, code)):
            return done
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            if not config.force and (done := _finished(folder, config, code)):
                lock.release()  # it finished while this process waited for nothing
                return done
            return prepare(folder, config, code, lock)
        except BaseException:
            lock.release()
            raise


def _finished(folder: RunFolder, config: RunConfig, code: provenance.CodeVersion) -> Claim | None:
    status = folder.status()
    if status is None or status.state != "finished":
        return None
    check_same_experiment(folder, config)
    notes = [f"{folder.run_id} is finished already and is not run again; force=true runs it again"]
    then = _made_by(folder)
    if then.commit != code.commit or then.dirty or code.dirty:
        notes.append(f"it was made by code at commit {then.label}; the code is now at {code.label}")
    if folder.summary() is None:
        notes.append(f"its summary can't be read: {folder.summary_path}")
    return Claim(folder, status, finished=True, notes=tuple(notes))


def _made_by(folder: RunFolder) -> provenance.CodeVersion:
    """The code that a folder's provenance names, without its differences."""
    git = (folder.provenance() or {}).get("git")
    git = git if isinstance(git, dict) else {}
    return provenance.CodeVersion(git.get("commit"), bool(git.get("dirty")))


def _code_has_changed(folder: RunFolder) -> tuple[str, ...]:
    """Record the code that is about to run where it isn't the one that queued the run; a note that says so."""
    code, then = provenance.code_version(), _made_by(folder)
    try:
        diff = read_text(folder.diff_path, errors="replace")
    except OSError:
        diff = ""
    if (code.commit, code.dirty, code.diff) == (then.commit, then.dirty, diff):
        return ()
    record = folder.provenance() or {}
    _write_provenance(folder, {**record, **provenance.of_code(code), "queued_with": record.get("git")}, code)
    return (f"it was queued with code at commit {then.label}; it runs with {code.label}, which may compute otherwise",)


def _start(folder: RunFolder, config: RunConfig, code: provenance.CodeVersion, lock: Ownership) -> Claim:
    claimed = _freeze(folder, config, code, lock)
    _begin(claimed)
    return claimed


def _put_in_queue(folder: RunFolder, config: RunConfig, code: provenance.CodeVersion, lock: Ownership) -> Claim:
    found = folder.status()
    if found is not None and found.waits_for_another:
        check_same_experiment(folder, config)
        return Claim(folder, found, notes=(f"{folder.run_id} was queued by {found.owner} already",), _lock=lock)
    return _freeze(folder, config, code, lock)


def _freeze(folder: RunFolder, config: RunConfig, code: provenance.CodeVersion, lock: Ownership) -> Claim:
    """Make the folder ready for an attempt: what was there before is set aside, and the attempt is queued."""
    check_same_experiment(folder, config)
    found = folder.status()
    notes: list[str] = []
    restarts = found.restarts if found is not None and found.never_began else 0
    if found is not None and found.state == "finished":
        place = _set_aside(folder, "previous", keep=("previous",))
        notes.append(f"{folder.run_id} was finished; force=true: its results are kept in {place}")
    elif found is None or not found.never_began:
        # The records up to its checkpoint are this attempt's too: they stay, and the trainer cuts those after it.
        stay = ("attempts", "previous", "checkpoints", "evaluation", SCHEDULER_RECORD, folder.metrics_path.name)
        place = _set_aside(folder, "attempts", keep=stay)
        if place is not None:
            if folder.metrics_path.exists():
                shutil.copy2(folder.metrics_path, place)
            restarts = 1 + (found.restarts if found else 0)
            last = checkpoints.newest(folder.checkpoints)
            how = f"going on from its checkpoint of step {last.step}" if last else "starting again"
            notes.append(f"{_describe_end(folder, found)}: {how}; its logs and metrics are kept in {place}")
    folder.logs.mkdir(exist_ok=True)
    write_origin(folder, config, code, run_id=folder.run_id, scientific=config.scientific())
    claimed = Claim(folder, Status("queued"), notes=tuple(notes), _lock=lock)
    claimed.update(
        total_steps=config.training.steps,
        pid=os.getpid(),
        host=socket.gethostname(),
        restarts=restarts,
        device=found.device if found is not None and folder.metrics_path.exists() else None,
    )
    return claimed


def _begin(claimed: Claim) -> None:
    claimed.update(state="running", started=utc_now(), pid=os.getpid(), host=socket.gethostname())


def write_origin(folder: RunFolder, config: RunConfig, code: provenance.CodeVersion, **more: Any) -> None:
    """Freeze the configuration, and say where what is about to be made comes from; ``more``: further facts of it."""
    from optimus_cc.yaml_files import to_yaml

    replace_file(folder.config_path, to_yaml(config.to_mapping()))
    _write_provenance(folder, {**provenance.collect(code), **more}, code)


def _write_provenance(folder: RunFolder, record: Mapping[str, Any], code: provenance.CodeVersion) -> None:
    if code.diff:
        replace_file(folder.diff_path, code.diff)
    else:
        folder.diff_path.unlink(missing_ok=True)
    record = {**record, "diff": folder.diff_path.name if code.diff else None}
    replace_file(folder.provenance_path, to_json(record, indent=2) + "\n")


def _describe_end(folder: RunFolder, found: Status | None) -> str:
    return f"{folder.run_id} {'was begun but left no status' if found is None else found.how_it_ended}"


def _recorded_science(folder: RunFolder) -> dict[str, Any] | None:
    """What the run in a folder computes; None if there is no run in it."""
    recorded = (folder.provenance() or {}).get("scientific")
    if isinstance(recorded, dict):
        return without_dead_keys(recorded)
    if not folder.config_path.exists():
        return None
    from optimus_cc.config import load

    try:
        science: dict[str, Any] = from_json(to_json(load(folder.config() or {}).scientific()))
    except (ValueError, OSError, TypeError):
        raise RunConflict(
            f"{folder.path} holds a config.yaml that can't be read as a run's",
            "  Move that folder away, or set runs_dir=FOLDER.",
        ) from None
    return science


def _differences(there: Any, here: Any, key: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for name in there.keys() | here.keys():
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
    elif there != here:
        yield f"{key}: {there!r} in the folder, {here!r} asked for"


def _set_aside(folder: RunFolder, kind: str, keep: Iterable[str]) -> Path | None:
    """Move a folder's content into the next free ``<kind>/<n>/``; the status last, so that a crash changes no state."""
    entries = [
        entry for entry in folder.path.iterdir() if entry.name not in keep and not ownership.is_a_mark(entry.name)
    ]
    if not entries:
        return None
    base = folder.path / kind
    base.mkdir(exist_ok=True)
    taken = [int(entry.name) for entry in base.iterdir() if entry.name.isdigit()]
    place = base / str(max(taken, default=0) + 1)
    place.mkdir()
    for entry in sorted(entries, key=lambda entry: entry == folder.status_path):
        shutil.move(entry, place / entry.name)
    return place


def _lock(folder: RunFolder) -> Ownership:
    """Take a folder that is there, whatever is in it; the caller lets go of it.

    Raises:
        RunBusy: another process has it; the message says which.
    """
    _refuse_unmarked(folder)
    try:
        return ownership.take(folder.path)
    except Held as held:
        message = f"{folder.run_id} is being run by {held} already; its folder is {folder.path}"
        if str(held).endswith(f" on {socket.gethostname()}"):
            raise RunBusy(message) from None
        hint = f"  Without a sign of life from there it can be started again after {STALE_S:.0f} s."
        raise RunBusy(message, hint) from None


def _refuse_unmarked(folder: RunFolder) -> None:
    """Where a run was started on another host by code that left no mark of its owner, its status has to tell."""
    status = folder.status()
    if status is None or status.state != "running" or status.host == socket.gethostname() or status.abandoned:
        return
    if not ownership.has_had(folder.path, status.pid, status.host):
        raise RunBusy(
            f"{folder.run_id} is being run by {status.owner} already; its folder is {folder.path}",
            f"  Its last sign of life was at {status.updated}; without another one it can be started again after "
            f"{STALE_S:.0f} s.",
        )
