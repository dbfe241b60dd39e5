"""Checkpoints: exact resume, resharding, and what damaged, missing, hostile or interrupted ones do."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc import checkpoints, disk_budget
from optimus_cc.checkpoints import Checkpoint
from optimus_cc.config import ConfigError, RunConfig, load
from tests.configurations import NEED_REPLICAS, PRESETS, VOCABULARY, low_rank, tiny
from tests.ranks import RankFailed, RankPool
from tests.training.resuming import train, without_timings

LAYOUTS = ("pp2", "pp4", "pp2_v2_overlap", "tp2_pp2", "pp4_dp2", "tp2_pp2_dp2")


def assert_same_end(config: RunConfig, whole: list[dict[str, Any]], resumed: list[dict[str, Any]], since: int) -> None:
    """A run that went on from step ``since`` is, from there on, the run that was never interrupted."""
    validates = since % config.training.validation_interval == 0  # a checkpoint comes before a step's validation
    for before, after in zip(whole, resumed, strict=True):
        assert after["records"], "nothing was trained"
        assert after["records"] == [
            record
            for record in before["records"]
            if record["step"] > since or (record["step"] == since and record["kind"] == "validation" and validates)
        ]
        assert before["traffic"] == after["traffic"]
        for kind in ("weights", "state"):
            assert before[kind].keys() == after[kind].keys()
            for name, value in before[kind].items():
                assert torch.equal(after[kind][name], value), (kind, name)


@pytest.mark.megatron
@pytest.mark.parametrize(("precision", "distributed_optimizer"), [("fp32", False), ("bf16", True)])
def test_a_stopped_run_goes_on_exactly(
    ranks: RankPool, tmp_path: Path, precision: str, distributed_optimizer: bool
) -> None:
    """With all techniques, dropout, records that span the stop, and a stop where validation is due."""
    config = tiny(
        "pp2_dp2_v2_overlap",
        PRESETS["cb_fe_sc"],
        steps=5,
        num_microbatches=4,
        log_interval=3,
        model={"dropout": 0.1},
        parallel={"distributed_optimizer": distributed_optimizer},
        precision=precision,
    )
    whole = ranks.run(4, train, config, tmp_path / "whole")
    stopped = ranks.run(4, train, config, tmp_path / "parts", stop_at=2)
    assert [result["stopped"] for result in stopped] == [True] * 4
    assert {result["ended_at"] for result in stopped} == {2}
    resumed = ranks.run(4, train, config, tmp_path / "parts")
    assert [result["began_at"] for result in resumed] == [2] * 4
    assert any("going on from step 2" in note for note in resumed[0]["notes"])
    validations = [record["step"] for record in resumed[0]["records"] if record["kind"] == "validation"]
    assert validations == [2, 4, 5], "the one that was due when the stop came is made up for"
    assert_same_end(config, whole, resumed, since=2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill_seed" in metafunc.fixturenames:
        metafunc.parametrize("kill_seed", metafunc.config.getoption("kill_seeds"))


def test_a_killed_run_goes_on_exactly(ranks: RankPool, tmp_path: Path, kill_seed: int) -> None:
    """SIGKILL of all ranks at a random moment, twice; ``--kill-seeds 0-19`` for more of them."""
    chance = random.Random(kill_seed)
    name = list(PRESETS)[kill_seed % len(PRESETS)]
    layout = chance.choice([layout for layout in LAYOUTS if "dp2" in layout or name not in NEED_REPLICAS])
    config = tiny(
        layout,
        PRESETS[name],
        steps=16,  # more than two kills can leave behind
        num_microbatches=4,
        validation_interval=3,
        parallel={"distributed_optimizer": chance.random() < 0.5},
        model={"dropout": 0.1},
        precision=chance.choice(["fp32", "bf16"]),
        checkpoint={"interval_steps": chance.choice([1, 2]), "interval_minutes": None},
    )
    size = config.parallel.world_size
    whole = ranks.run(size, train, config, tmp_path / "whole")
    history = []
    for _ in range(2):
        kill = chance.randint(2, 5), chance.uniform(0.0, 1.5)
        with pytest.raises(RankFailed):
            ranks.run(size, train, config, tmp_path / "parts", kill=kill)
        last = checkpoints.newest(tmp_path / "parts")
        history.append(f"{kill[0]} steps and {kill[1]:.2f}: checkpoint {last.step if last else None}")
    resumed = ranks.run(size, train, config, tmp_path / "parts")
    since = resumed[0]["began_at"]
    history.append(f"went on from {since}")
    optimizer = "distributed" if config.parallel.distributed_optimizer else "plain"
    print(f"{name}, {layout}, {config.training.precision}, {optimizer} optimizer: killed after {'; '.join(history)}")
    if since > 0:
        assert_same_end(config, whole, resumed, since)
    for before, after in zip(whole, resumed, strict=True):
        assert all(torch.equal(after["weights"][key], value) for key, value in before["weights"].items())


@pytest.mark.megatron
@pytest.mark.parametrize(("distributed_optimizer", "others"), [(False, ("pp4", "single")), (True, ("tp2",))])
def test_another_layout_goes_on_with_the_same_training(
    ranks: RankPool, tmp_path: Path, distributed_optimizer: bool, others: tuple[str, ...]
) -> None:
    def settings(layout: str) -> dict[str, Any]:
        parallel = {"distributed_optimizer": distributed_optimizer}
        return {"num_microbatches": 4 if "dp2" in layout else 8, "parallel": parallel}

    def go_on(layout: str, source: str | None, steps: int, folder: Path) -> list[dict[str, Any]]:
        config = tiny(layout, steps=steps, resume_from=source, **settings(layout))
        return ranks.run(config.parallel.world_size, train, config, folder)

    checkpoint = tmp_path / "runs" / "first" / "checkpoints" / "step_00000002"
    first = go_on("tp2_pp2_dp2", None, 2, checkpoint.parent)
    losses = {}
    for layout in ("tp2_pp2_dp2", *others):
        results = go_on(layout, str(checkpoint), 4, tmp_path / layout)
        assert {result["began_at"] for result in results} == {2}
        assert ("start afresh" in " ".join(results[0]["notes"])) == (layout != "tp2_pp2_dp2")
        losses[layout] = [record["loss"] for record in results[0]["records"]]
    for layout, values in losses.items():
        assert values == pytest.approx(losses["tp2_pp2_dp2"], rel=2e-5), layout
        assert values[0] < first[0]["records"][0]["loss"] - 0.01, "it went on, it didn't start again"


MADE_WITH: list[dict[str, Any]] = [
    {"precision": precision, "parallel": {"distributed_optimizer": distributed}}
    for precision in ("fp32", "bf16")
    for distributed in (False, True)
]


@pytest.mark.megatron
@pytest.mark.parametrize("made", MADE_WITH, ids=str)
def test_optimizer_states_go_from_each_kind_to_each_other(
    ranks: RankPool, tmp_path: Path, made: dict[str, Any]
) -> None:
    """Weights, moments and step, and the first loss after; the schedule and the settings are the new run's."""
    source = tmp_path / "runs" / "first" / "checkpoints" / "step_00000002"
    first = ranks.run(2, _state_after, tiny("dp2", steps=2, num_microbatches=1, **made), source.parent)[0]
    for other in MADE_WITH:
        optimizer = {"learning_rate": 5e-3, "beta1": 0.8, "warmup_fraction": 0.0, "decay_style": "constant"}
        config = tiny("dp2", steps=3, num_microbatches=1, resume_from=str(source), optimizer=optimizer, **other)
        found = ranks.run(2, _state_after, config, tmp_path / "none", False)[0]
        assert found["settings"] == (5e-3, (0.8, 0.999), 2.0)
        for kind in ("exp_avg", "exp_avg_sq", "weight"):
            for name, value in first[kind].items():
                assert torch.equal(found[kind][name], value), (other, kind, name)


def _state_after(config: RunConfig, folder: Path, trains: bool = True) -> dict[str, Any]:
    """What the optimizer holds in full, by name, after training to the end or after going on from ``resume_from``."""
    from optimus_cc.training import loop
    from optimus_cc.training.checkpoint import Checkpoints
    from tests.training_runs import backend_in_world, random_tokens

    backend = backend_in_world(config)
    trainer = loop.Trainer.build(config, backend, VOCABULARY)
    saver = Checkpoints(config, folder, backend)
    saver.resume(trainer)
    if trains:
        loop.run(trainer, random_tokens(config), random_tokens(config), lambda _: None, saver=saver)
    inner = trainer.optimizer.chained_optimizers[0] if hasattr(trainer.optimizer, "chained_optimizers") else None
    assert inner is not None
    group, steps = inner.optimizer.param_groups[0], {float(v["step"]) for v in inner.optimizer.state.values()}
    model = trainer.model[0].module
    names = {parameter: name for name, parameter in model.named_parameters()}
    names = {parameter: name.removeprefix("module.") for parameter, name in names.items()}
    found: dict[str, Any] = {"settings": (group["lr"], tuple(group["betas"]), *steps)}
    for kind in ("exp_avg", "exp_avg_sq", "weight"):
        found[kind] = {name: _full(inner, parameter, kind) for parameter, name in names.items()}
    return found


def _full(inner: Any, parameter: Any, kind: str) -> torch.Tensor:
    """A parameter's fp32 weight or moment, all of it, whichever optimizer holds it."""
    if hasattr(inner, "gbuf_ranges"):
        whole = torch.zeros(parameter.shape).flatten()
        if parameter in inner.model_param_group_index_map:
            held = inner._get_main_param_and_optimizer_states(parameter)
            place = inner._get_model_param_range_map(parameter)["param"]
            whole[place.start : place.end] = held["param" if kind == "weight" else kind].detach().flatten()
        torch.distributed.all_reduce(whole)
        return whole.view(parameter.shape)
    main = getattr(parameter, "main_param", None)
    main = parameter if main is None else main
    value: torch.Tensor = main if kind == "weight" else inner.optimizer.state[main][kind]
    return value.detach().clone()


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A finished run with checkpoints of steps 2 and 4."""
    config = tiny("pp2", low_rank(), steps=4, num_microbatches=2, checkpoint={"interval_steps": 2})
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(2, train, config, folder)
    return config, folder


@pytest.fixture
def two_checkpoints(saved: tuple[RunConfig, Path], tmp_path: Path) -> tuple[RunConfig, Path]:
    shutil.copytree(saved[1], tmp_path / "checkpoints")
    return saved[0], tmp_path / "checkpoints"


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Any] = {
    "half manifest": lambda place: _cut(place / "manifest.json"),
    "no manifest": lambda place: (place / "manifest.json").unlink(),
    "odd manifest": lambda place: (place / "manifest.json").write_text('{"step": 4, "files": 3}'),
    "another step's manifest": lambda place: shutil.copy(place.parent / "step_00000002" / "manifest.json", place),
    "half file": lambda place: _cut(place / "rank_1.pt"),
    "no index": lambda place: (place / ".metadata").unlink(),
    "empty": lambda place: [path.unlink() for path in place.iterdir()],
    "another value": lambda place: _edit(place, lambda said: said["scientific"]["training"].update(seed=4321)),
    "null": lambda place: _edit(place, lambda said: said.update(scientific=None)),
    "null, and no checksum": lambda place: _edit(place, lambda said: said.update(scientific=None), checksum=False),
    "a pipe": lambda place: _pipe(place / "rank_1.pt"),
    "a pipe that nobody wrote of": lambda place: os.mkfifo(place / "pipe"),
    "a device": lambda place: _link(place / "rank_1.pt", "/dev/zero"),
    "a pipe for a manifest": lambda place: _pipe(place / "manifest.json"),
}


def _edit(place: Path, change: Any, checksum: bool = True) -> None:
    said = json.loads((place / "manifest.json").read_text())
    change(said)
    if not checksum:
        del said["manifest_crc32"]
    (place / "manifest.json").write_text(json.dumps(said))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_incomplete_checkpoint_looks_like_one(two_checkpoints: tuple[RunConfig, Path], damage: Any) -> None:
    newest, older = checkpoints.all_in(two_checkpoints[1])
    assert newest.problem() is older.problem() is None
    damage(newest.path)
    assert newest.problem() is not None
    assert older.problem() is None
    assert checkpoints.newest(two_checkpoints[1]) == older


@pytest.mark.parametrize("name", [".metadata", "rank_1.pt", "__0_0.distcp"])
def test_every_bit_counts(two_checkpoints: tuple[RunConfig, Path], name: str) -> None:
    newest = checkpoints.all_in(two_checkpoints[1])[0]
    shares = [newest.damaged_files(part, 2) for part in range(2)]
    assert shares == [[], []]
    _flip(newest.path / name)
    assert [file for part in range(2) for file in newest.damaged_files(part, 2)] == [name]


@pytest.mark.parametrize(
    "damage", [DAMAGES["empty"], lambda place: _flip(place / "__0_0.distcp")], ids=["empty", "bit"]
)
def test_a_damaged_checkpoint_is_skipped_with_a_word(
    ranks: RankPool, two_checkpoints: tuple[RunConfig, Path], damage: Any
) -> None:
    config, folder = two_checkpoints
    damage(folder / "step_00000004")
    results = ranks.run(2, train, config, folder)
    assert {result["began_at"] for result in results} == {2}
    assert "the checkpoint of step 4 is skipped" in results[0]["notes"][0]
    assert [found.step for found in checkpoints.all_in(folder)] == [4, 2]
    assert checkpoints.all_in(folder)[0].problem() is None, "a good one took its place"


def test_manifests_from_before_there_was_a_checksum_are_good(two_checkpoints: tuple[RunConfig, Path]) -> None:
    newest = checkpoints.all_in(two_checkpoints[1])[0]
    _edit(newest.path, lambda said: None)  # laid out in another way
    assert newest.problem() is None
    _edit(newest.path, lambda said: None, checksum=False)
    assert newest.problem() is None


def test_good_checkpoints_do_not_go_in_favour_of_damaged_ones(
    ranks: RankPool, saved: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    """The newest of two is damaged and the older one is gone: from 0 on, each save keeps what it wrote."""
    config = saved[0]
    once = tiny("pp2", low_rank(), steps=4, num_microbatches=2, checkpoint={"interval_steps": 1, "keep_last": 1})
    place = tmp_path / "checkpoints" / "step_00000009"
    shutil.copytree(saved[1] / "step_00000004", place)
    _edit(place, lambda said: said.update(step=9), checksum=False)
    _flip(place / "__0_0.distcp")
    results = ranks.run(2, train, once, place.parent, stop_at=2)
    assert {result["began_at"] for result in results} == {0}
    assert [found.step for found in checkpoints.all_in(place.parent)] == [9, 2]
    results = ranks.run(2, train, once, place.parent)
    assert {result["began_at"] for result in results} == {2}
    assert [found.step for found in checkpoints.all_in(place.parent)] == [9, 4]
    assert config.run_id == once.run_id


UNLOADABLE: dict[str, Any] = {
    "no state of a rank": lambda place: torch.save([1], place / "rank_1.pt"),
    "another index": lambda place: (place / ".metadata").write_bytes(pickle.dumps({})),
    "an index of something else": lambda place: (place / ".metadata").write_bytes(b"nothing"),
    "tensors of another shape": lambda place: (place / "__1_0.distcp").write_bytes(b"nothing"),
}


@pytest.mark.parametrize("spoil", UNLOADABLE.values(), ids=UNLOADABLE)
def test_what_can_not_be_loaded_is_passed_over_as_if_it_were_not_there(
    ranks: RankPool, saved: tuple[RunConfig, Path], two_checkpoints: tuple[RunConfig, Path], spoil: Any
) -> None:
    """With right checksums; the only one left, too: then it is as if the run had just begun."""
    config, folder = two_checkpoints
    for step in (4, 2):
        _spoil(folder / f"step_{step:08d}", spoil)
    results = ranks.run(2, train, config, folder)
    assert ["can't be loaded" in note for note in results[0]["notes"]] == [True, True]
    assert {result["began_at"] for result in results} == {0}
    resumed = ranks.run(2, train, config, saved[1])
    for one, other in zip(results, resumed, strict=True):
        for name, value in other["weights"].items():
            assert torch.equal(one["weights"][name], value), name
    assert checkpoints.all_in(folder)[0].problem() is None


def _spoil(place: Path, spoil: Any) -> None:
    manifest = Checkpoint(place, int(place.name[5:])).manifest()
    assert manifest is not None
    spoil(place)
    files = {name: checkpoints.file_record(place / name) for name in manifest["files"]}
    checkpoints.write_manifest(place, {**manifest, "files": files})


def _train_with_stuck_files(config: RunConfig, folder: Path, stuck: str) -> Any:
    """Nothing in a folder of a name that has ``stuck`` in it can be removed."""
    real = os.unlink

    def unlink(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path) == stuck:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        real(path, *args, **kwargs)

    os.unlink = unlink
    return train(config, folder)["ended_at"]


def test_what_can_not_be_removed_is_in_nobody_s_way(ranks: RankPool, tmp_path: Path) -> None:
    config = tiny("single", steps=3, checkpoint={"interval_steps": 1, "keep_last": 1})
    for step in (1, 2, 3):
        left = checkpoints.partial_path(tmp_path / "runs", step)
        left.mkdir(parents=True)
        (left / "rank_0.pt").touch()
    assert ranks.run(1, _train_with_stuck_files, config, tmp_path / "runs", "rank_0.pt") == [3]
    assert [found.step for found in checkpoints.all_in(tmp_path / "runs")] == [3]


def test_of_a_linked_checkpoint_the_link_goes(two_checkpoints: tuple[RunConfig, Path], tmp_path: Path) -> None:
    _, folder = two_checkpoints
    place = folder / "step_00000002"
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    checkpoints.remove(Checkpoint(place, 2))
    assert not place.is_symlink()
    assert (tmp_path / "elsewhere" / "manifest.json").exists()
    assert [found.step for found in checkpoints.all_in(folder)] == [4]


class _Payload:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self._path),)


@pytest.mark.megatron
def test_nothing_in_a_checkpoint_is_executed(
    ranks: RankPool, saved: tuple[RunConfig, Path], two_checkpoints: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, folder = two_checkpoints
    place, proof = folder / "step_00000004", tmp_path / "executed"
    manifest = Checkpoint(place, 4).manifest()
    assert manifest is not None
    names = {".metadata", "common.pt", "rank_0.pt"} & manifest["files"].keys()
    assert len(names) >= 2
    for name in sorted(names):
        if name == ".metadata":
            (place / name).write_bytes(pickle.dumps(_Payload(proof)))
        else:
            torch.save({"random": _Payload(proof)}, place / name)
        record = checkpoints.file_record(place / name)
        checkpoints.write_manifest(place, {**manifest, "files": {**manifest["files"], name: record}})
        results = ranks.run(2, train, config, folder)
        assert "step_00000004 can't be loaded" in results[0]["notes"][0]
        assert {result["began_at"] for result in results} == {2}
        assert not proof.exists(), name
        shutil.rmtree(place)
        shutil.copytree(saved[1] / place.name, place)
    pickle.loads(pickle.dumps(_Payload(proof)))
    assert proof.exists(), "the payload works"


def test_what_was_interrupted_while_saving_is_no_checkpoint(
    ranks: RankPool, two_checkpoints: tuple[RunConfig, Path]
) -> None:
    config, folder = two_checkpoints
    shutil.move(folder / "step_00000004", folder / ".step_00000004.partial")
    results = ranks.run(2, train, config, folder)
    assert {result["began_at"] for result in results} == {2}
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000002", "step_00000004"]


def _train_with_full_disk(config: RunConfig, folder: Path, how: str) -> str:
    """The disk fills up at the second save, on rank 1 while it writes, or before anything is written."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from optimus_cc.training.checkpoint import CheckpointError

    def full(*args: Any, **kwargs: Any) -> Any:
        if (folder / "step_00000002").exists() and (how != "rank" or os.environ["RANK"] == "1"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    if how == "space":
        real_usage = shutil.disk_usage

        def usage(path: Any) -> Any:
            found = real_usage(path)
            return found._replace(free=1000) if (folder / "step_00000002").exists() else found

        shutil.disk_usage = usage
    else:
        real = FileSystemWriter.write_data
        FileSystemWriter.write_data = full  # type: ignore[method-assign]
    try:
        train(config, folder)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.megatron
def test_a_full_disk_leaves_the_last_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    config = tiny("pp2", low_rank(), steps=6, num_microbatches=2, checkpoint={"interval_steps": 2})
    whole = ranks.run(2, train, config, tmp_path / "whole")
    for how in ("all ranks", "rank", "space"):
        folder = tmp_path / how
        for message in ranks.run(2, _train_with_full_disk, config, folder, how):
            assert "the checkpoint of step 4 could not be written" in message
            assert "o space left" in message
            assert "the last one is of step 2" in message
        assert [path.name for path in folder.iterdir()] == ["step_00000002"], "nothing half done is left"
    assert_same_end(config, whole, ranks.run(2, train, config, folder), since=2)


def test_old_checkpoints_go(ranks: RankPool, tmp_path: Path) -> None:
    config = tiny("single", steps=5, checkpoint={"interval_steps": 1, "keep_last": 3})
    ranks.run(1, train, config, tmp_path)
    assert [found.step for found in checkpoints.all_in(tmp_path)] == [5, 4, 3]
    assert ranks.run(1, train, config, tmp_path)[0]["records"] == [], "it was finished"


class _SaverThatIsInterrupted:
    """The stop request comes while the first checkpoint is being written."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.stop: Any = None

    def due(self, step: int) -> bool:
        return step == 2

    def save(self, trainer: Any, rest: dict[str, Any]) -> None:
        self.saved.append(trainer.step)
        self.stop.requested = True


def _stop_while_saving(config: RunConfig) -> tuple[int, list[int]]:
    from optimus_cc.training import loop
    from tests.training_runs import backend_in_world, random_tokens

    saver, stop = _SaverThatIsInterrupted(), loop.StopRequest()
    saver.stop = stop
    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    result = loop.run(trainer, random_tokens(config), random_tokens(config), lambda _: None, stop=stop, saver=saver)
    assert isinstance(result, loop.Stopped)
    return result.step, saver.saved


def test_a_signal_while_saving_is_heeded_at_once(ranks: RankPool) -> None:
    assert ranks.run(2, _stop_while_saving, tiny("pp2", steps=6)) == [(2, [2])] * 2


def test_when_a_checkpoint_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optimus_cc.training import checkpoint

    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def saver(**settings: Any) -> Any:
        return checkpoint.Checkpoints(tiny(checkpoint=settings), tmp_path, None)  # type: ignore[arg-type]

    by_steps, by_time = saver(interval_steps=3, interval_minutes=None), saver(interval_minutes=2.0)
    assert [by_steps.due(step) for step in (1, 2, 3, 4, 6)] == [False, False, True, False, True]
    assert not by_time.due(1)
    now += 119.0
    assert not by_time.due(2)
    now += 1.0
    assert by_time.due(2)
    assert not saver(interval_minutes=None).due(1000)


def test_checkpoint_settings_are_no_part_of_the_identity() -> None:
    assert tiny().run_id == tiny(checkpoint={"interval_steps": 7, "keep_last": 9}).run_id


class TestResumeFrom:
    def _fake(self, tmp_path: Path, config: RunConfig, step: int = 2) -> Path:
        place = tmp_path / "runs" / config.run_id / "checkpoints" / f"step_{step:08d}"
        place.mkdir(parents=True)
        manifest = {"step": step, "run_id": config.run_id, "files": {}, "scientific": config.scientific()}
        (place / "manifest.json").write_text(json.dumps(manifest))
        return place

    def test_it_is_part_of_the_identity(self, tmp_path: Path) -> None:
        source = self._fake(tmp_path, tiny())
        moved = tmp_path / "elsewhere" / source.parent.parent.name
        shutil.copytree(source.parent.parent, moved)
        one, other = tiny(resume_from=str(source)), tiny(resume_from=str(moved / "checkpoints" / source.name))
        assert one.run_id != tiny().run_id
        assert one.run_id == other.run_id, "where it lies plays no part"

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({"model": {"hidden_size": 64}}, "model"),
            ({"optimizer": {"name": "sgd"}}, "optimizer.name"),
            ({"micro_batch_size": 4}, "training.global_batch_size"),
            ({"steps": 2}, "before training.steps = 2"),
        ],
    )
    def test_what_can_not_go_on(self, tmp_path: Path, changes: dict[str, Any], word: str) -> None:
        source = self._fake(tmp_path, tiny())
        with pytest.raises(ConfigError, match=r"training\.resume_from") as caught:
            tiny(resume_from=str(source), **changes)
        assert word in str(caught.value)

    def test_a_run_folder_is_not_a_checkpoint(self, tmp_path: Path) -> None:
        source = self._fake(tmp_path, tiny())
        with pytest.raises(ConfigError) as caught:
            tiny(resume_from=str(source.parent.parent))
        assert str(source) in str(caught.value), "it says which ones there are"

    def test_an_incomplete_one(self, tmp_path: Path) -> None:
        source = self._fake(tmp_path, tiny())
        (source / "manifest.json").unlink()
        with pytest.raises(ConfigError, match="complete"):
            tiny(resume_from=str(source))


@pytest.mark.parametrize(
    ("precision", "distributed_optimizer", "name"),
    [("fp32", False, "adam"), ("bf16", False, "adam"), ("fp32", True, "adam"), ("fp32", False, "sgd")],
)
def test_what_a_checkpoint_takes_is_told_beforehand(
    ranks: RankPool, tmp_path: Path, precision: str, distributed_optimizer: bool, name: str
) -> None:
    config = tiny(
        "single",
        steps=1,
        model={"hidden_size": 128},
        optimizer={"name": name},
        parallel={"distributed_optimizer": distributed_optimizer},
        precision=precision,
    )
    config = load({**config.to_mapping(), "tokenizer": {"name": "bpe", "vocabulary_size": VOCABULARY}})
    ranks.run(1, train, config, tmp_path)
    (found,) = checkpoints.all_in(tmp_path)
    assert disk_budget.checkpoint_nbytes(config) == pytest.approx(found.nbytes, rel=0.05)


def test_timings_are_the_only_thing_left_out_of_the_comparison() -> None:
    record = {"kind": "train", "loss": 1.0, "traffic": {}, "grad_norm": 2.0, "step_time_s": 1.0, "learning_rate": 0.1}
    assert without_timings(record).keys() == record.keys() - {"step_time_s"}
