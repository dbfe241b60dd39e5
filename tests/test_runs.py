"""The run folder: atomic files, readers that take anything, and the rules for starting."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc import provenance
from optimus_cc.claims import claim, claim_queued, queue, withdraw
from optimus_cc.config import RunConfig, load
from optimus_cc.provenance import CodeVersion, code_version
from optimus_cc.records import (
    JsonLinesTail,
    append_json_line,
    from_json,
    last_json_line,
    read_json_lines,
    read_json_object,
    replace_file,
    to_json,
)
from optimus_cc.runs import RunBusy, RunCancelled, RunConflict, RunFailed, RunFolder, Status, traffic_per_step
from tests.configurations import tiny
from tests.records import NO_RECORDS

ROOT = Path(__file__).resolve().parents[1]
GARBAGE = [
    b"",
    b"\0\xff\xfe",
    b"{",
    b"[1, 2]",
    b"null",
    b'"text"',
    b"[" * 100_000,
    b'{"state": "dancing"}',
    b'{"state": []}',
]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return _changed(tiny("pp2"), runs_dir=str(tmp_path))


@pytest.fixture(autouse=True)
def code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "code_version", lambda: CodeVersion("a" * 40))


def _changed(config: Any, **changes: Any) -> Any:
    return dataclasses.replace(config, **changes)


def _forced(config: RunConfig) -> Any:
    return _changed(config, force=True)


# Records.


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda children: st.lists(children) | st.dictionaries(st.text(), children),
        max_leaves=20,
    )
)
def test_json_round_trip(value: Any) -> None:
    text = to_json(value)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(from_json(text)) == repr(_read_back(value))


def _read_back(value: Any) -> Any:
    """The one thing that doesn't survive: text that is spelled like a non-finite float."""
    if isinstance(value, list):
        return [_read_back(item) for item in value]
    if isinstance(value, dict):
        return {key: _read_back(item) for key, item in value.items()}
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def test_json_of_other_types() -> None:
    import numpy as np

    assert to_json({"a": np.float32(0.5), "b": np.int64(3), "c": (1, Path("x")), 4: np.float64("nan")}) == (
        '{"a": 0.5, "b": 3, "c": [1, "x"], "4": "NaN"}'
    )
    with pytest.raises(TypeError, match="object"):
        to_json({"a": object()})


def test_appending_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_json_line(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert list(read_json_lines(path)) == [{"step": 1}]
    assert last_json_line(path) == {"step": 1}
    append_json_line(path, {"step": 3})
    assert list(read_json_lines(path)) == [{"step": 1}, {"step": 3}]
    assert last_json_line(path) == {"step": 3}


def test_tail_reads_each_record_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonLinesTail(path)
    assert tail.new_records() == []
    append_json_line(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"step"')
    assert tail.new_records() == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b': 2}\nnonsense\n[3]\n{"step": 4}\n')
    assert tail.new_records() == [{"step": 2}, {"step": 4}]
    assert tail.new_records() == []
    path.write_text('{"step": 5}\n')
    assert tail.new_records() == [{"step": 5}]


@pytest.mark.parametrize("odd", NO_RECORDS, ids=lambda odd: str(odd)[:40])
def test_what_is_no_record_is_no_reader_s_business(odd: dict[str, Any], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    good = [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2, 3)]
    tail = JsonLinesTail(folder.metrics_path)
    for record in (good[0], odd, good[1], good[2], odd):
        folder.append_metrics(record)
    assert list(folder.metrics()) == good
    assert tail.new_records() == good
    assert folder.latest("train") == good[2]
    folder.cut_metrics(2, last={"kind": "resume", "step": 2})
    assert list(folder.metrics()) == [*good[:2], {"kind": "resume", "step": 2}]
    assert len(folder.metrics_path.read_text().splitlines()) == 3


@pytest.mark.parametrize("padding", [10, 10_000, 300_000])
def test_last_record_of_a_kind(padding: int, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(30):
        folder.append_metrics({"kind": "validation" if step == 7 else "train", "step": step, "text": "x" * padding})
    assert (folder.latest("train") or {})["step"] == 29
    assert (folder.latest("validation") or {})["step"] == 7
    assert folder.latest("other") is None
    assert [record["step"] for record in folder.metrics("validation")] == [7]
    assert len(list(folder.metrics())) == 30


def test_replacing_is_atomic(tmp_path: Path) -> None:
    """A reader that hammers the status sees nothing but whole ones."""
    folder = RunFolder(tmp_path)
    folder.write_status(Status("queued"))
    wrong: list[Any] = []
    done = threading.Event()

    def hammer() -> None:
        while not done.is_set():
            status = folder.status()
            if status is None or (status.cause or "") != "x" * (1000 * status.step):
                wrong.append(status)

    readers = [threading.Thread(target=hammer) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(200):
        folder.write_status(Status("running", step=step % 50, cause="x" * (1000 * (step % 50))))
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_a_failed_replacement_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    replace_file(path, "old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("content", GARBAGE)
def test_readers_take_anything(content: bytes, tmp_path: Path) -> None:
    for name in ("config.yaml", "status.json", "summary.json", "provenance.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes(content)
    _read_everything(RunFolder(tmp_path))


def test_readers_take_nothing_and_folders(tmp_path: Path) -> None:
    _read_everything(RunFolder(tmp_path / "missing"))
    for name in ("config.yaml", "status.json", "summary.json", "provenance.json", "metrics.jsonl"):
        (tmp_path / name).mkdir()
    _read_everything(RunFolder(tmp_path))


def _read_everything(folder: RunFolder) -> None:
    assert folder.status() is None
    folder.config(), folder.summary(), folder.provenance(), folder.exists()
    list(folder.metrics())
    assert folder.latest("train") is None


def test_status_with_odd_values(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(
        '{"state": "running", "step": "many", "pid": 1.5, "updated": "yesterday", "new_key": 1, "host": "h"}'
    )
    status = RunFolder(tmp_path).status()
    assert status == Status("running", updated="yesterday", host="h")
    assert status is not None
    assert status.abandoned


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {
                "traffic": {
                    "a": {"logical_bytes": 8, "wire_bytes": 4, "logical_bytes_per_step": 2, "wire_bytes_per_step": 1}
                }
            },
            {"a": {"logical_bytes": 2.0, "wire_bytes": 1.0}},
        ),
        (
            {"kind": "train", "traffic": {"a": {"logical_bytes": 8, "wire_bytes": 4}, "b": None, "c": {}}},
            {"a": {"logical_bytes": 8.0, "wire_bytes": 4.0}},
        ),
        ({"traffic": 3}, {}),
        ({}, {}),
    ],
)
def test_traffic_per_step(record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert traffic_per_step(record) == expected


# Starting.


def test_a_new_run(config: RunConfig) -> None:
    with claim(config) as run:
        folder = run.folder
        assert folder.path == Path(config.runs_dir) / config.run_id
        assert not run.finished
        assert not run.notes
        status = folder.status()
        assert status is not None
        assert not status.abandoned
        assert (status.state, status.pid, status.host) == ("running", os.getpid(), socket.gethostname())
        assert status.total_steps == config.training.steps
        assert folder.logs.is_dir()
    frozen = folder.config()
    assert frozen is not None
    assert load(frozen) == config
    record = folder.provenance()
    assert record is not None
    assert record["git"]["commit"] == "a" * 40
    assert record["versions"]["torch"]
    assert record["command"]
    assert record["host"] == socket.gethostname()
    assert not folder.diff_path.exists()


def test_uncommitted_changes_are_kept(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "code_version", lambda: CodeVersion("a" * 40, True, "+print()\n", ("new.py",)))
    with claim(config) as run:
        record = read_json_object(run.folder.provenance_path)
        assert record is not None
        assert (run.folder.path / record["diff"]).read_text() == "+print()\n"
        assert record["git"] == {"commit": "a" * 40, "dirty": True, "untracked": ["new.py"]}


def _finish(config: RunConfig, **summary: Any) -> RunFolder:
    with claim(config) as run:
        run.folder.append_metrics({"kind": "train", "step": 4})
        run.folder.write_summary(summary)
        run.update(state="finished", step=4)
    return run.folder


def test_finished_is_not_run_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _finish(config, loss=1.0)
    before = folder.status()
    with claim(config) as run:
        assert run.finished
        assert run.folder.summary() == {"loss": 1.0}
        assert len(run.notes) == 1
        assert "force=true" in run.notes[0]
    assert folder.status() == before

    monkeypatch.setattr(provenance, "code_version", lambda: CodeVersion("b" * 40, True))
    with claim(config) as run:
        assert "at commit aaaaaaaaaa; the code is now at bbbbbbbbbb with uncommitted changes" in run.notes[1]


def test_probes_make_no_other_experiment(config: RunConfig) -> None:
    probes = _changed(config.training.probes, memory=True, phases=True, interval_steps=2, trace_step=3)
    probed = _changed(config, training=_changed(config.training, probes=probes))
    with claim(config) as run:  # is interrupted
        run.update(state="failed", cause="x", step=1)
    with claim(probed) as run:
        assert not run.finished
        assert run.folder.path == Path(config.runs_dir).absolute() / config.run_id
        frozen = run.folder.config()
        assert frozen is not None
        assert load(frozen).training.probes == probes
        run.update(state="finished", step=4)
    with claim(config) as run:
        assert run.finished


def test_finished_with_a_damaged_summary_says_so(config: RunConfig) -> None:
    folder = _finish(config)
    folder.summary_path.write_text("{")
    with claim(config) as run:
        assert run.finished
        assert "can't be read" in run.notes[-1]


def test_force_keeps_the_old_results(config: RunConfig) -> None:
    folder = _finish(config, loss=1.0)
    folder.checkpoints.mkdir()
    for number in (1, 2):
        with claim(_forced(config)) as run:
            assert not run.finished
            assert f"previous/{number}" in run.notes[0]
            assert not folder.metrics_path.exists()
            assert not folder.checkpoints.exists()
            run.folder.write_summary({"loss": 1.0 + number})
            run.update(state="finished")
    assert read_json_object(folder.path / "previous" / "1" / "summary.json") == {"loss": 1.0}
    assert read_json_object(folder.path / "previous" / "2" / "summary.json") == {"loss": 2.0}
    assert (folder.path / "previous" / "1" / "checkpoints").is_dir()
    assert folder.summary() == {"loss": 3.0}


@pytest.mark.parametrize("state", ["failed", "cancelled", "preempted", "running"])
@pytest.mark.parametrize("force", [False, True])
def test_unfinished_starts_again(state: str, force: bool, config: RunConfig) -> None:
    with claim(config) as run:
        run.folder.append_metrics({"kind": "train", "step": 3})
        (run.folder.logs / "rank_0.log").write_text("first")
        run.folder.checkpoints.mkdir()
        run.update(state=state, step=3, cause="reasons", pid=2**22 + 1)
    for number in (1, 2):
        with claim(_forced(config) if force else config) as run:
            assert len(run.notes) == 1
            assert f"attempts/{number}" in run.notes[0]
            assert run.status.restarts == number
            assert run.status.step == 0
            assert run.status.cause is None
            # What goes on from a checkpoint needs the records up to it; the trainer cuts them.
            assert run.folder.latest("train") == {"kind": "train", "step": 3}
            assert not list(run.folder.logs.iterdir())
            assert run.folder.checkpoints.is_dir()
            run.update(state=state, step=number, cause="reasons", pid=2**22 + 1)
        attempt = RunFolder(run.folder.path / "attempts" / str(number))
        status = attempt.status()
        assert status is not None
        assert status.state == state
        assert attempt.config() is not None
    first = RunFolder(run.folder.path / "attempts" / "1")
    assert first.latest("train") == {"kind": "train", "step": 3}
    assert (first.logs / "rank_0.log").read_text() == "first"


def test_a_folder_begun_and_left(config: RunConfig) -> None:
    """As a crash in the first moments leaves it."""
    path = Path(config.runs_dir) / config.run_id
    path.mkdir()
    (path / ".lock").touch()
    with claim(config) as run:
        assert not run.notes
    (path / "status.json").unlink()
    with claim(config) as run:
        assert "left no status" in run.notes[0]


def test_queued_is_not_an_attempt(config: RunConfig) -> None:
    with claim(config) as run:
        run.update(state="queued")
    with claim(config) as run:
        assert not run.notes
        assert run.status.restarts == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_another_experiment_under_the_same_id(
    recorded: bool, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _finish(config)
    if not recorded:
        folder.provenance_path.unlink()
    other = _changed(config, training=_changed(config.training, seed=99))
    monkeypatch.setattr(RunConfig, "run_ids", (folder.run_id,))
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("[!.]*")}
    for attempt in (other, _forced(other)):
        with pytest.raises(RunConflict, match=r"training.seed: 1234 in the folder, 99 asked for"):
            claim(attempt)
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("[!.]*")} == before


def test_a_configuration_that_cannot_be_read(config: RunConfig) -> None:
    path = Path(config.runs_dir) / config.run_id
    path.mkdir()
    (path / "config.yaml").write_text("something: else\n")
    with pytest.raises(RunConflict, match="can't be read"):
        claim(config)
    assert (path / "config.yaml").read_text() == "something: else\n"


def test_what_is_no_part_of_the_experiment_may_change(config: RunConfig) -> None:
    with claim(config) as run:
        run.update(state="failed")
    changed = _changed(config, training=_changed(config.training, timeout_s=5.0))
    with claim(changed) as run:
        frozen = run.folder.config()
        assert frozen is not None
        assert frozen["training"]["timeout_s"] == 5.0


_HOLD = """
import dataclasses, sys
from optimus_cc.claims import claim
from tests.configurations import tiny
with claim(dataclasses.replace(tiny("pp2"), runs_dir=sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def _held_by_another_process(config: RunConfig) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, config.runs_dir],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_running_run_is_not_doubled(config: RunConfig) -> None:
    with _held_by_another_process(config) as process:
        for attempt in (config, _forced(config)):
            with pytest.raises(RunBusy, match=f"process {process.pid} on {socket.gethostname()}"):
                claim(attempt)
    with claim(config) as run:
        assert "its supervisor" in run.notes[0]
        assert "died" in run.notes[0]


def test_within_one_process_too(config: RunConfig) -> None:
    with claim(config), pytest.raises(RunBusy):
        claim(config)
    with claim(config):
        pass


def test_a_run_on_another_host(config: RunConfig) -> None:
    """Where locks don't reach, the status tells: by when it was renewed last."""
    with claim(config) as run:
        run.update(host="elsewhere", pid=7)
    with pytest.raises(RunBusy, match="process 7 on elsewhere"):
        claim(config)
    record = json.loads(run.folder.status_path.read_text())
    run.folder.status_path.write_text(json.dumps({**record, "updated": "2020-01-01T00:00:00+00:00"}))
    with claim(config) as run:
        assert run.status.restarts == 1


def test_without_locks(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with claim(config) as run, pytest.raises(RunBusy, match=str(os.getpid())):
        claim(config)
    run.update(state="failed")
    with claim(config):
        pass


def test_a_place_that_cannot_be_written(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed, match="can't be written"):
        claim(_changed(config, runs_dir=str(tmp_path / "file")))


def test_failures_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(RunConflict("cause", "details")))
    assert (type(error), str(error), error.cause) == (RunConflict, "cause\ndetails", "cause")


# Provenance.


def test_code_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "optimus_cc" / "provenance.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(provenance, "__file__", str(source))

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert code_version() == CodeVersion()
    git("init")
    assert code_version() == CodeVersion()
    git("add", ".")
    assert code_version().commit is None
    git("commit", "-m", "first")
    clean = code_version()
    assert clean.commit is not None
    assert len(clean.commit) == 40
    assert not clean.dirty
    source.write_text("x = 1\n")
    (tmp_path / "new.py").touch()
    dirty = code_version()
    assert dirty.dirty
    assert dirty.commit == clean.commit
    assert "+x = 1" in dirty.diff
    assert dirty.untracked == ("new.py",)


def test_non_finite_metrics_come_back_as_floats(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"kind": "train", "step": 1, "loss": math.nan, "nested": {"up": [math.inf, -math.inf]}})
    (record,) = folder.metrics()
    assert math.isnan(record["loss"])
    assert record["nested"] == {"up": [math.inf, -math.inf]}
    assert "NaN" in folder.metrics_path.read_text()


# The queue.


def _state(folder: RunFolder) -> Status:
    status = folder.status()
    assert status is not None
    return status


def test_queueing_freezes_and_starting_reads(config: RunConfig) -> None:
    folder = queue(config).folder
    assert _state(folder).state == "queued"
    frozen = folder.config_path.read_bytes()
    assert folder.run_config() == config
    with claim_queued(folder, folder.run_config()) as run:
        assert not run.notes
        assert _state(folder).state == "running"
        assert _state(folder).started is not None
        with pytest.raises(RunBusy):
            queue(config)
        with pytest.raises(RunBusy):
            claim_queued(folder, config)
    assert folder.config_path.read_bytes() == frozen


def test_queueing_a_finished_run_does_nothing(config: RunConfig) -> None:
    folder = _finish(config, loss=1.0)
    before = folder.status()
    assert queue(config).finished
    assert folder.status() == before
    assert claim_queued(folder, config).finished
    assert not queue(_forced(config)).finished
    assert (folder.path / "previous" / "1" / "summary.json").exists()
    with claim_queued(folder, config) as run:
        assert run.status.restarts == 0
    assert not (folder.path / "attempts").exists()


@pytest.mark.parametrize("state", ["failed", "cancelled", "preempted", "running"])
@pytest.mark.parametrize("withdrawals", [0, 2])
def test_an_unfinished_run_goes_on_through_the_queue(state: str, withdrawals: int, config: RunConfig) -> None:
    """However often it is queued and taken out again: that is no attempt."""
    with claim(config) as run:
        run.folder.append_metrics({"kind": "train", "step": 3})
        (run.folder.logs / "rank_0.log").write_text("first")
        run.folder.checkpoints.mkdir()
        run.update(state=state, step=3, cause="reasons", pid=2**22 + 1, device="cpu")
    folder = run.folder
    for _ in range(withdrawals):
        queue(config)
        assert withdraw(folder, "cancelled", "stopped")
        assert not withdraw(folder, "cancelled", "stopped again")
        assert (_state(folder).state, _state(folder).cause) == ("cancelled", "stopped")
    queue(config)
    with claim_queued(folder, folder.run_config()) as run:
        assert (run.status.restarts, run.status.step) == (1, 0)
        assert run.folder.latest("train") == {"kind": "train", "step": 3}
        assert run.folder.checkpoints.is_dir()
    assert [path.name for path in (folder.path / "attempts").iterdir()] == ["1"]
    assert (folder.path / "attempts" / "1" / "logs" / "rank_0.log").read_text() == "first"


def test_a_queued_run_that_was_restarted_before_keeps_its_count(config: RunConfig) -> None:
    with claim(config) as run:
        run.update(state="failed", cause="x")
    queue(config)
    with claim(config) as run:
        assert run.status.restarts == 1


def test_what_another_process_has_queued_stays(config: RunConfig) -> None:
    folder = queue(config).folder
    changed = _changed(config, training=_changed(config.training, timeout_s=5.0))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        folder.write_status(dataclasses.replace(_state(folder), pid=other.pid))
        before = folder.config_path.read_bytes(), folder.status_path.read_bytes()
        assert "queued by" in queue(changed).notes[0]
        assert (folder.config_path.read_bytes(), folder.status_path.read_bytes()) == before
        assert not queue(_changed(config, force=True), anew=True).finished  # for a job that would not run that
        assert (folder.run_config().force, _state(folder).pid, _state(folder).restarts) == (True, os.getpid(), 0)
        other.kill()
    queue(changed)
    assert folder.run_config() == changed


def test_not_queued_any_more(config: RunConfig) -> None:
    folder = queue(config).folder
    withdraw(folder, "cancelled", "not wanted")
    with pytest.raises(RunCancelled, match="not wanted"):
        claim_queued(folder, config)
    folder.write_status(Status("failed", cause="a rank died"))
    with pytest.raises(RunFailed, match="a rank died"):
        claim_queued(folder, config)
    folder.status_path.unlink()
    with pytest.raises(RunFailed, match="no status"):
        claim_queued(folder, config)


def test_code_that_changed_in_between_is_told_and_recorded(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = queue(config).folder
    monkeypatch.setattr(provenance, "code_version", lambda: CodeVersion("b" * 40, True, "+1\n"))
    with claim_queued(folder, config) as run:
        assert "aaaaaaaaaa; it runs with bbbbbbbbbb with uncommitted changes" in run.notes[0]
    record = folder.provenance() or {}
    assert (record["git"]["commit"], record["queued_with"]["commit"]) == ("b" * 40, "a" * 40)
    assert folder.diff_path.read_text() == "+1\n"
    assert record["run_id"] == config.run_id


def test_science_that_changed_in_between_is_refused(config: RunConfig) -> None:
    folder = queue(config).folder
    with pytest.raises(RunConflict, match="seed"):
        claim_queued(folder, _changed(config, training=_changed(config.training, seed=99)))
