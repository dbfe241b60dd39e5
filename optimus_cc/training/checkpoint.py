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
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import torch as megatron_strategies
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from optimus_cc import checkpoints
from optimus_cc.checkpoints import Checkpoint
from optimus_cc.communication.gradient_sync import unwrapped
from optimus_cc.config import RunConfig
from optimus_cc.config.identity import without_dead_keys
from optimus_cc.provenance import utc_now
from optimus_cc.records import from_json, replace_file, to_json
from optimus_cc.training.backend import Backend
from optimus_cc.training.loop import Trainer
from optimus_cc.training.optimizer import parts_of
from optimus_cc.training.safe_loading import check_index, weights_only

_CONTENT = {
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
    "distrib_optim_sharding_type": "fully_reshardable",
}
"""How Megatron-core lays out what it saves."""
_SHARDED = (ShardedTensor, ShardedTensorFactory)


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
"""What torch and Megatron-core raise when they can't write or read a checkpoint."""


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
        partial = checkpoints.partial_path(self._folder, step)
        final = checkpoints.path_of(self._folder, step)
        try:
            self._once(lambda: self._make_room(partial, Checkpoint(final, step)))
            self._write(trainer, rest, partial)
            self._once(lambda: self._publish(partial, final))
        except _FAILURES as error:
            with contextlib.suppress(OSError):
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(self._told(step, error)) from error
        self._saved_at = time.monotonic()
        self._heartbeat()

    def _write(self, trainer: Trainer, rest: dict[str, Any], place: Path) -> None:
        state: dict[str, Any] = _sharded_state(trainer)
        state["scheduler"] = trainer.scheduler.state_dict()
        rank_file = io.BytesIO()
        mine = {"random": _random_state(self._backend), "compressors": trainer.attachment.state_dict(), **rest}
        torch.save(mine, rank_file)
        self._check_space(state, rank_file.getbuffer().nbytes)
        dist_checkpointing.save(state, str(place), sharded_strategy=_InProcess(), content_metadata=dict(_CONTENT))
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
            replace_file(place / checkpoints.MANIFEST, to_json(manifest, indent=1) + "\n")

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
        shards = (value for value in nested_values(state) if isinstance(value, _SHARDED))
        mine = sum(shard.data.nbytes for shard in shards if is_main_replica(shard.replica_id)) + rank_file_nbytes
        total = torch.tensor([mine])
        dist.all_reduce(total, group=self._backend.control_group)
        needed, free = int(total), self._agree_on(lambda: shutil.disk_usage(self._folder).free)
        if free < needed:
            raise OSError(f"no space left: it takes {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")

    def _make_room(self, partial: Path, final: Checkpoint) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        checkpoints.remove_partial(self._folder)
        if final.path.exists():  # of an attempt that was not gone on with
            checkpoints.remove(final)
        partial.mkdir()

    def _publish(self, partial: Path, final: Path) -> None:
        partial.rename(final)
        _sync(self._folder)
        for old in checkpoints.all_in(self._folder)[self._config.training.checkpoint.keep_last :]:
            checkpoints.remove(old)

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
        found, notes = self.newest()
        source = self._config.training.resume_from
        if found is None and source is not None:
            found = self._agree_on(lambda: checkpoints.at(Path(source)))
            if found is None:
                raise CheckpointError(f"training.resume_from: there is no checkpoint {source}")
            if damage := self._damage(found):
                raise CheckpointError(f"training.resume_from: {source} can't be used: {damage}")
        if found is None:
            return None, notes
        own = found.path.parent == self._folder
        rest, words = self.restore(trainer, found)
        notes.append(f"going on from step {found.step}{'' if own else f' of {found.path}'}")
        # What another run has counted is not this one's.
        return rest if own else None, [*notes, *words]

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint whose files are all as they were written, and a line about each that is not."""
        words: list[str] = []
        for found in self._agree_on(lambda: checkpoints.all_in(self._folder)):
            damage = self._damage(found)
            if damage is None:
                return found, words
            words.append(f"the checkpoint of step {found.step} is skipped: {damage}")
        return None, words

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
        mine: dict[str, Any] | None = None
        differences = self._differences(found)
        try:
            check_index(found.path)
            with weights_only():
                state = _sharded_state(trainer, is_loading=True)
                loaded = dist_checkpointing.load(state, str(found.path))
                if not differences:
                    mine = torch.load(found.path / _rank_file(self._backend.rank), weights_only=True)
        except _FAILURES as error:
            raise CheckpointError(f"the checkpoint {found.path} can't be loaded: {_root(error)}") from error
        self._heartbeat()
        for index, chunk in enumerate(trainer.model):
            _load_chunk(unwrapped(chunk), loaded[f"model{index}"])
        _load_optimizer(trainer.optimizer, loaded["optimizer"])
        trainer.scheduler.load_state_dict(loaded["scheduler"])
        trainer.step = found.step
        if mine is None:
            return None, [
                f"it was made with another {' and '.join(differences)}: model and optimizer go on, resharded as "
                "needed; error memories, queries and random states start afresh"
            ]
        _set_random_state(mine.pop("random"), self._backend)
        device = self._backend.device
        trainer.attachment.load_state_dict({key: value.to(device) for key, value in mine.pop("compressors").items()})
        return mine, []

    def load_model(self, model: Sequence[torch.nn.Module], found: Checkpoint) -> None:
        """Bring the chunks of this rank, whatever the layout, to the weights that ``found`` holds, and nothing else.

        Raises:
            CheckpointError: it is damaged, or gone, or can't be loaded.
        """
        if damage := self._damage(found):
            raise CheckpointError(f"the checkpoint {found.path} can't be used: {damage}")
        try:
            check_index(found.path)
            with weights_only():
                loaded = dist_checkpointing.load(_without_objects(_model_state(model)), str(found.path))
        except _FAILURES as error:
            raise CheckpointError(f"the checkpoint {found.path} can't be loaded: {_root(error)}") from error
        self._heartbeat()
        for index, chunk in enumerate(model):
            _load_chunk(unwrapped(chunk), loaded[f"model{index}"])

    def _differences(self, found: Checkpoint) -> list[str]:
        """What of this run isn't as it was when ``found`` was saved, as far as a rank's own state depends on it."""
        manifest = found.manifest() or {}
        theirs = without_dead_keys(manifest.get("scientific", {}))
        ours = from_json(to_json(self._config.scientific()))
        names = {"parallel": "layout", "technique": "technique"}
        differences = [word for group, word in names.items() if theirs.get(group) != ours[group]]
        if manifest.get("world_size") != self._backend.world_size and "layout" not in differences:
            differences.insert(0, "layout")
        return differences

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


def _sharded_state(trainer: Trainer, is_loading: bool = False) -> dict[str, Any]:
    state = _model_state(trainer.model)
    if is_loading:
        _fill_optimizer_state(trainer.optimizer)
    optimizer = trainer.optimizer.sharded_state_dict({**state}, is_loading=is_loading, metadata=dict(_CONTENT))
    state["optimizer"] = optimizer
    return _without_objects(state)


def _model_state(model: Sequence[torch.nn.Module]) -> dict[str, Any]:
    return {
        f"model{index}": _megatron(chunk).sharded_state_dict(metadata=dict(_CONTENT))
        for index, chunk in enumerate(model)
    }


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Without Transformer Engine's extra states: empty unless FP8 is used, and pickled objects if it is."""
    _, rest = extract_matching_values(state, lambda value: isinstance(value, ShardedObject))
    plain: dict[str, Any] = rest
    return plain


def _megatron(chunk: torch.nn.Module) -> Any:
    """The model inside its wrappers, with the methods that Megatron-core gives its modules."""
    return unwrapped(chunk)


def _fill_optimizer_state(optimizer: Any) -> None:
    """Give every parameter its state, so that there is something to load into; the values are overwritten.

    A step makes it, whatever the optimizer: those of Megatron-core differ in how they would, or can't.
    """
    for inner in (one.optimizer for one in parts_of(optimizer)):
        if inner is None or inner.state:
            continue
        parameters = [parameter for group in inner.param_groups for parameter in group["params"] if parameter.numel()]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        inner.step()
        for parameter in parameters:
            parameter.grad = None


def _load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    optimizers = parts_of(optimizer)
    parts = [state] if len(optimizers) == 1 else [state[index] for index in range(len(optimizers))]
    for one, part in zip(optimizers, parts, strict=True):
        if one.optimizer is None:
            continue  # this rank has no parameters of its kind
        shards = part.pop("param_state", None)
        one.load_state_dict(part)
        # With torch's Adam, Megatron-core's distributed optimizer expects each parameter's step among the shards, where
        # it isn't, and leaves one tensor that all parameters would count in.
        steps = {key: values.pop("step").clone() for key, values in one.optimizer.state.items() if "step" in values}
        if shards is not None:
            one.load_parameter_state_from_fully_reshardable(shards)
        for key, step in steps.items():
            one.optimizer.state[key]["step"] = step


def _load_chunk(model: torch.nn.Module, state: dict[str, Any]) -> None:
    result = model.load_state_dict(state, strict=False)
    missing = [key for key in (*result.missing_keys, *result.unexpected_keys) if not key.endswith("_extra_state")]
    if missing:
        raise CheckpointError(f"the checkpoint and the model do not hold the same parameters: {missing[0]}")


def _random_state(backend: Backend) -> dict[str, Any]:
    """Of Python, numpy, torch and Megatron-core on this rank, as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            cached,
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(backend.device) if backend.is_cuda else None,
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def _set_random_state(state: dict[str, Any], backend: Backend) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if backend.is_cuda:
        torch.cuda.set_rng_state(state["cuda"], backend.device)
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


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
