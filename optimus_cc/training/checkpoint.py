"""Saves and restores a training, exactly at the same layout, and its model and optimizer at any other.

Model and optimizer go through Megatron-core's distributed checkpoints (format ``torch_dist``), which reshard. What
belongs to one rank (random states, error memories and queries, the sums of a record that is not finished) is a file of
its own, ``rank_N.pt``, and is of use at the same layout only. See :mod:`optimus_cc.checkpoints` for the files.

Nothing in a checkpoint is executed on loading: tensors and plain values only are unpickled, by torch's restricted
unpickler, and the index of the distributed checkpoint by one that knows the classes of such an index.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as megatron_strategies
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from optimus_cc import checkpoints
from optimus_cc.checkpoints import Checkpoint
from optimus_cc.config import RunConfig
from optimus_cc.config.identity import without_dead_keys
from optimus_cc.files import open_regular
from optimus_cc.provenance import utc_now
from optimus_cc.records import from_json, to_json
from optimus_cc.training import sharded
from optimus_cc.training.backend import Backend, random_state, set_random_state
from optimus_cc.training.loop import Trainer
from optimus_cc.training.safe_loading import read_index, weights_only

_LOGGER = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what is there can't be used."""


_FAILURES = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    AssertionError,
    pickle.UnpicklingError,
    CheckpointingException,
    CheckpointException,
)
"""What torch and Megatron-core raise when they can't write a checkpoint."""
_NOT_ITS_FAULT = (torch.OutOfMemoryError, MemoryError, dist.DistError)
"""What may be raised while a checkpoint is loaded, and says nothing about it."""


class Checkpoints:
    """The checkpoints of one run: when one is due, saving, and going on from the newest. All methods are collective.

    Args:
        config: the run's.
        folder: where they lie; shared by all ranks.
        backend: this rank's.
        heartbeat: called while something takes long.
    """

    def __init__(
        self, config: RunConfig, folder: Path, backend: Backend, heartbeat: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._folder = folder
        self._backend = backend
        self._heartbeat = heartbeat
        self._saved_at = time.monotonic()
        self._sound: dict[int, bool] = {}
        """Of checkpoints by step, as far as this process knows: whether they can be gone on from."""
        self._stuck: set[Path] = set()
        """What could not be removed, and was told so."""

    # -- saving --------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether this rank finds that it is time; ranks' clocks differ, so they have to agree on one answer."""
        settings = self._config.training.checkpoint
        by_steps = settings.interval_steps is not None and step % settings.interval_steps == 0
        minutes = (time.monotonic() - self._saved_at) / 60
        return by_steps or (settings.interval_minutes is not None and minutes >= settings.interval_minutes)

    def save(self, trainer: Trainer, rest: dict[str, Any]) -> None:
        """Write a checkpoint of ``trainer`` as it is now, and remove those that are too old.

        Args:
            rest: what else this rank needs to go on exactly; tensors and plain values.

        Raises:
            CheckpointError: it could not be written; those before it are as they were.
        """
        step = trainer.step
        final = checkpoints.path_of(self._folder, step)
        partial: Path | None = None
        try:
            self._once(lambda: self._make_room(Checkpoint(final, step)))
            partial = self._agree_on(lambda: checkpoints.partial_path(self._folder, step))
            assert partial is not None
            place = partial
            self._once(lambda: place.mkdir())
            self._write(trainer, rest, place)
            self._once(lambda: self._publish(place, final))
        except _FAILURES as error:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(self._told(step, error)) from error
        self._saved_at = time.monotonic()
        self._heartbeat()
        self._sound[step] = True
        self._remove_old()

    def _write(self, trainer: Trainer, rest: dict[str, Any], place: Path) -> None:
        state: dict[str, Any] = sharded.to_save(trainer.model, trainer.optimizer)
        state["scheduler"] = trainer.scheduler.state_dict()
        rank_file = io.BytesIO()
        # Not a copy of it: error memories can be as large as the gradients.
        compressors = trainer.attachment.state_dict(copy=False)
        mine = {"random": random_state(self._backend), "compressors": compressors, **rest}
        torch.save(mine, rank_file)
        self._check_space(state, rank_file.getbuffer().nbytes)
        dist_checkpointing.save(
            state, str(place), sharded_strategy=_InProcess(), content_metadata=dict(sharded.CONTENT)
        )
        self._heartbeat()
        (place / _rank_file(self._backend.rank)).write_bytes(rank_file.getbuffer())
        dist.barrier(group=self._backend.control_group)
        files = self._describe(place)
        if self._backend.rank == 0:
            manifest = {
                "step": trainer.step,
                "run_id": self._config.run_id,
                "time": utc_now(),
                "world_size": self._backend.world_size,
                "scientific": self._config.scientific(),
                "megatron_core": importlib.metadata.version("megatron-core"),
                "torch": torch.__version__,
                "files": files,
            }
            checkpoints.write_manifest(place, manifest)

    def _describe(self, place: Path) -> dict[str, dict[str, int]]:
        """Sizes and checksums of all files, now surely on the disk; each rank looks at its share."""
        ranks, me = self._backend.world_size, self._backend.rank
        names = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
        mine = {name: checkpoints.file_record(place / name) for name in names[me::ranks]}
        for name in mine:
            _sync(place / name)
        found: dict[str, dict[str, int]] = {}
        for part in self._backend.everyone(mine):
            for name, entry in part.items():
                if entry is None:
                    raise OSError(f"{name} can't be read back")
                found[name] = entry
        return dict(sorted(found.items()))

    def _check_space(self, state: dict[str, Any], rank_file_nbytes: int) -> None:
        """A disk that is too small is better noticed before the writing than in the middle of it."""
        shards = (value for value in nested_values(state) if isinstance(value, sharded.SHARDED))
        mine = sum(shard.data.nbytes for shard in shards if is_main_replica(shard.replica_id)) + rank_file_nbytes
        total = torch.tensor([mine])
        dist.all_reduce(total, group=self._backend.control_group)
        needed, free = int(total), self._agree_on(lambda: shutil.disk_usage(self._folder).free)
        if free < needed:
            raise OSError(f"no space left: it takes {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")

    def _make_room(self, final: Checkpoint) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        checkpoints.remove_partial(self._folder)
        if final.path.exists() or final.path.is_symlink():  # of an attempt that was not gone on with
            with contextlib.suppress(OSError):
                checkpoints.remove(final)
            if final.path.exists():
                raise OSError(f"{final.path.name}, which can't be used, can't be removed either")

    def _publish(self, partial: Path, final: Path) -> None:
        partial.rename(final)
        _sync(self._folder)

    def _remove_old(self) -> None:
        """Remove what is older than the newest ones that can be gone on from; a newer one that can't stays for now.

        What was written or loaded by this process is known to be sound; others are read once.
        """
        kept = 0
        for found in self._agree_on(lambda: checkpoints.all_in(self._folder)):
            if kept >= self._config.training.checkpoint.keep_last:
                if self._backend.rank == 0:
                    self._remove(found)
            else:
                kept += self._is_sound(found)

    def _is_sound(self, found: Checkpoint) -> bool:
        if found.step not in self._sound:
            self._sound[found.step] = self._damage(found) is None
        return self._sound[found.step]

    def _remove(self, old: Checkpoint) -> None:
        try:
            checkpoints.remove(old)
        except OSError as error:
            if old.path not in self._stuck:
                _LOGGER.warning("the old checkpoint %s can't be removed: %s; training goes on", old.path, error)
            self._stuck.add(old.path)

    def _told(self, step: int, error: BaseException) -> str:
        last = checkpoints.newest(self._folder)
        rest = f"the last one is of step {last.step}" if last else "there is none before it"
        return f"the checkpoint of step {step} could not be written to {self._folder}: {_root(error)}; {rest}"

    # -- going on ------------------------------------------------------------------------------------------------

    def resume(self, trainer: Trainer) -> tuple[dict[str, Any] | None, list[str]]:
        """Bring ``trainer`` to this run's newest checkpoint, or to the one of another run that it is to go on from.

        Returns:
            what this rank gave to :meth:`save` besides the trainer, None if that is not there or of no use; and what
            there is to say.

        Raises:
            CheckpointError: what there is can't be loaded.
        """
        notes: list[str] = []
        tried = False
        for found in self._agree_on(lambda: checkpoints.all_in(self._folder)):
            problem = self._damage(found)
            if problem is None:
                tried = True
                try:
                    rest, words = self.restore(trainer, found)
                except CheckpointError as error:
                    problem = str(error)
                else:
                    self._sound[found.step] = True
                    return rest, [*notes, f"going on from step {found.step}", *words]
            self._sound[found.step] = False
            notes.append(f"the checkpoint of step {found.step} is skipped: {problem}")
        if tried:  # and half loaded, perhaps
            trainer.start_over()
        if (source := self._config.training.resume_from) is None:
            return None, notes
        other = self._agree_on(lambda: checkpoints.at(Path(source)))
        if other is None:
            raise CheckpointError(f"training.resume_from: there is no checkpoint {source}")
        if damage := self._damage(other):
            raise CheckpointError(f"training.resume_from: {source} can't be used: {damage}")
        _, words = self.restore(trainer, other)
        # What another run has counted is not this one's.
        return None, [*notes, f"going on from step {other.step} of {other.path}", *words]

    def _damage(self, found: Checkpoint) -> str | None:
        """Why a checkpoint can't be used; ranks read a share of its files each."""
        problem: str | None = self._agree_on(found.problem)
        if problem is not None:
            return problem
        damaged = self._backend.everyone(found.damaged_files(self._backend.rank, self._backend.world_size))
        self._heartbeat()
        files = [name for part in damaged for name in part]
        return f"{files[0]} is damaged" if files else None

    def restore(self, trainer: Trainer, found: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
        """Bring ``trainer`` to where ``found`` was saved.

        Returns:
            the ``rest`` that this rank saved, or None where it is of no use because it belongs to another layout or
            technique; and what there is to say about it.

        Raises:
            CheckpointError: it can't be loaded.
        """
        differences = self._differences(found)
        mine: dict[str, Any] | None = None
        stored: dict[str, torch.dtype | None] = {}

        def look() -> None:
            nonlocal mine, stored
            stored = read_index(found.path)
            if not differences:
                with weights_only(), open_regular(found.path / _rank_file(self._backend.rank)) as file:
                    mine = dict(torch.load(file, weights_only=True, map_location="cpu"))

        def load() -> None:
            with weights_only():
                sharded.load(trainer.model, trainer.optimizer, found.path, stored, found.step)

        def take() -> None:
            if mine is None:
                return
            set_random_state(mine.pop("random"), self._backend)
            device = self._backend.device
            compressors = {key: value.to(device) for key, value in mine.pop("compressors").items()}
            trainer.attachment.load_state_dict(compressors)

        for part in (look, load, take):
            self._together(part, found)
        trainer.step = found.step
        trainer.scheduler.step(increment=found.step - trainer.scheduler.num_steps)
        if differences:
            return None, [
                f"it was made with another {' and '.join(differences)}: model and optimizer go on, resharded as "
                "needed; error memories, queries and random states start afresh"
            ]
        return mine, []

    def load_model(self, model: Sequence[torch.nn.Module], found: Checkpoint) -> None:
        """Bring the chunks of this rank, whatever the layout, to the weights that ``found`` holds, and nothing else.

        Raises:
            CheckpointError: it is damaged, or gone, or can't be loaded.
        """
        if damage := self._damage(found):
            raise CheckpointError(f"the checkpoint {found.path} can't be used: {damage}")

        def load() -> None:
            with weights_only():
                sharded.load_model(model, found.path, read_index(found.path))

        self._together(load, found)

    def _differences(self, found: Checkpoint) -> list[str]:
        """What of this run isn't as it was when ``found`` was saved, as far as a rank's own state depends on it."""
        manifest = found.manifest() or {"scientific": {}}
        theirs = without_dead_keys(manifest["scientific"])
        ours = from_json(to_json(self._config.scientific()))
        names = {"parallel": "layout", "technique": "technique"}
        differences = [word for group, word in names.items() if theirs.get(group) != ours[group]]
        if manifest.get("world_size") != self._backend.world_size and "layout" not in differences:
            differences.insert(0, "layout")
        return differences

    def _together(self, action: Callable[[], None], found: Checkpoint) -> None:
        """Let every rank do a part of loading ``found``; if any of them can't, it is an error on all."""
        problem: str | None = None
        try:
            action()
        except _NOT_ITS_FAULT:
            raise
        except (Exception, CheckpointException) as error:  # whatever a file can hold
            problem = f"{_root(error)}" or type(error).__name__
        problems = [one for one in self._backend.everyone(problem) if one is not None]
        self._heartbeat()
        if problems:
            raise CheckpointError(f"the checkpoint {found.path} can't be loaded: {problems[0]}")

    # -- ranks together ------------------------------------------------------------------------------------------

    def _agree_on(self, look: Callable[[], Any]) -> Any:
        """What rank 0 sees."""
        seen = [look() if self._backend.rank == 0 else None]
        dist.broadcast_object_list(seen, src=0, group=self._backend.control_group)
        return seen[0]

    def _once(self, action: Callable[[], None]) -> None:
        """Let rank 0 do something; every rank learns whether it worked."""
        error: OSError | None = None
        if self._backend.rank == 0:
            try:
                action()
            except OSError as caught:
                error = caught
        error = self._agree_on(lambda: error)
        if error is not None:
            raise error


class _InProcess(megatron_strategies.TorchDistSaveShardedStrategy):
    """Megatron-core's format written by torch's own writer, in this process.

    Megatron-core's writer forks helper processes from a process that holds communicators, and an error of one rank
    leaves the others waiting; torch's raises on all of them.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        plain, _, _ = megatron_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_save(
            megatron_strategies.mcore_to_pyt_state_dict(plain, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1, overwrite=False),
            planner=megatron_strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _rank_file(rank: int) -> str:
    return f"rank_{rank}.pt"


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _root(error: BaseException) -> BaseException:
    """What a rank raised, out of what torch wraps around it."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error
