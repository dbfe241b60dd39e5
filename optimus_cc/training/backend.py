"""The device, the process groups and the random state of one rank."""

from __future__ import annotations

import importlib.util
import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from optimus_cc.config import RunConfig

T = TypeVar("T")
_FileStore: Any = dist.__dict__["FileStore"]
"""Takes bytes, too, for paths that no text can stand for; its type doesn't say so."""


@dataclass(frozen=True)
class Backend:
    """Where this rank computes and how it talks to the others."""

    device: torch.device
    rank: int
    world_size: int
    control_group: dist.ProcessGroup
    """All ranks, over gloo: small values on the CPU that must not wait for the device."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def everyone(self, mine: T) -> list[T]:
        """What every rank gives, by rank: picklable, small. Every rank must call."""
        given = [mine] * self.world_size
        dist.all_gather_object(given, mine, group=self.control_group)
        return given

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def start(config: RunConfig) -> Backend:
    """Join the world that the launcher describes in the environment and set up Megatron-core's process groups.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, OPTIMUS_CC_DEVICE (``cpu`` or ``cuda``; default: CUDA where there is one)
    and OPTIMUS_CC_RENDEZVOUS (see :func:`meeting_place`; default: MASTER_ADDR and MASTER_PORT).
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(config)
    timeout = timedelta(seconds=config.training.timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        **meeting_place(os.environ.get("OPTIMUS_CC_RENDEZVOUS", "env://"), world_size, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        # A bound device makes NCCL run unbatched sends and receives one after the other on one communicator.
        device_id=device if device.type == "cuda" and config.parallel.batch_p2p else None,
    )
    join(config)
    # Small values on the CPU, apart from the device's communicator.
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Backend(device=device, rank=rank, world_size=world_size, control_group=control)


def meeting_place(rendezvous: str, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Where ranks find each other, as arguments of ``init_process_group``.

    Args:
        rendezvous: an ``init_method`` of torch's. Of ``file://PATH`` the path is taken as it is: torch would end it at
            the first ``#`` or ``?``, in a file that other runs meet in, too.
    """
    path = rendezvous.removeprefix("file://")
    if path == rendezvous:
        return {"init_method": rendezvous}
    store: Any = _FileStore(os.fsencode(path), world_size)
    store.set_timeout(timeout)
    return {"store": store}


def join(config: RunConfig) -> None:
    """Make Megatron-core's process groups in an initialised world, and set the random state."""
    from megatron.core import parallel_state

    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.num_chunks if parallel.num_chunks > 1 else None,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=config.training.timeout_s / 60,
    )
    seed_everything(config.training.seed)


def stop() -> None:
    """Leave the world. Not called after a failure: the other ranks may be gone."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Random state as Megatron-LM sets it: stages differ, tensor-parallel ranks agree where they must."""
    from megatron.core import parallel_state, tensor_parallel

    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def random_state(backend: Backend) -> dict[str, Any]:
    """Of Python, numpy, torch and Megatron-core on this rank, as tensors and plain values."""
    from megatron.core import tensor_parallel

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


def set_random_state(state: dict[str, Any], backend: Backend) -> None:
    """Put back what :func:`random_state` gave."""
    from megatron.core import tensor_parallel

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if backend.is_cuda:
        torch.cuda.set_rng_state(state["cuda"], backend.device)
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def is_installed(module: str) -> bool:
    """Whether an optional package is there, without importing it."""
    return importlib.util.find_spec(module) is not None


def choose_device(config: RunConfig) -> torch.device:
    """The device of this rank, made ready. On the CPU this must come before the first import of Megatron-core."""
    wanted = os.environ.get("OPTIMUS_CC_DEVICE", config.training.device)
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    from optimus_cc.training import cpu

    cpu.enable()
    return torch.device("cpu")
