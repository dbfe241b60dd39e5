"""What the peak of a step's memory is made of: training itself, what codecs need while they run, what they keep."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimus_cc.exposure import Message
from optimus_cc.phases import Phase
from optimus_cc.training.backend import Backend
from optimus_cc.training.optimizer import parts_of


class _Allocations(Protocol):
    """Bytes of tensors on one device."""

    source: str

    def watching(self) -> AbstractContextManager[Any]:
        """Only what happens inside is seen."""

    def allocated(self) -> int: ...

    def take_peak(self) -> int:
        """The most that was allocated since the last call."""


class CudaAllocations:
    """What the caching allocator counts, as the host asks for it; the device is not waited for."""

    source = "allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)

    def watching(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class TensorAllocations(TorchDispatchMode):
    """Counts the storages of tensors as operators make them and as they die, where no allocator can be asked.

    Not seen: what an operator allocates for itself alone.

    Args:
        held: tensors that are there already.
    """

    source = "tensors"

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, weakref.finalize[..., Any]] = {}
        self._allocated = self._peak = 0
        for tensor in held:
            self._add(tensor)

    def watching(self) -> AbstractContextManager[Any]:
        return self

    def allocated(self) -> int:
        return self._allocated

    def take_peak(self) -> int:
        peak, self._peak = self._peak, self._allocated
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._allocated += nbytes
        self._peak = max(self._peak, self._allocated)
        # The Python object lives as long as the storage itself.
        self._alive[key] = weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        del self._alive[key]
        self._allocated -= nbytes

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for finalizer in self._alive.values():
            finalizer.detach()
        self._alive.clear()


class MemoryMeter:
    """Divides the peak of one step into three parts; a :class:`~.SpanListener` that looks at codec spans.

    - residuals: the most that error memories and queries took, counted tensor by tensor;
    - workspaces: the most that was allocated while a codec ran, beyond what was there before and what it keeps;
    - baseline: the most that was allocated while none ran, without error memories and queries.

    The three peaks need not coincide: peak <= baseline + workspaces + residuals.

    Args:
        kept: the error memories and queries as they are now.
        held: the model's, the gradients' and the optimizer's tensors, by name of the part.
    """

    def __init__(
        self, backend: Backend, kept: Callable[[], Iterable[torch.Tensor]], held: dict[str, list[torch.Tensor]]
    ) -> None:
        self._kept = kept
        self._held_bytes = dict(_exclusive_bytes(held))
        everything = [tensor for tensors in held.values() for tensor in tensors]
        self._memory: _Allocations = (
            CudaAllocations(backend.device) if backend.is_cuda else TensorAllocations([*everything, *kept()])
        )
        self._phases: list[Phase] = []
        self._peak = self._baseline = self._workspaces = 0
        self._kept_bytes = self._residuals = nbytes(kept())
        self._entry = 0

    def watching(self) -> AbstractContextManager[Any]:
        """Around the step."""
        return self._memory.watching()

    def open(self, phase: Phase, name: str, about: Message | None) -> None:
        if phase == "codec":
            self._end_of_baseline()
            self._entry = self._memory.allocated()
        self._phases.append(phase)

    def close(self) -> None:
        if self._phases.pop() != "codec":
            return
        peak = self._memory.take_peak()
        kept = nbytes(self._kept())
        self._workspaces = max(self._workspaces, peak - self._entry - max(0, kept - self._kept_bytes))
        self._peak = max(self._peak, peak)
        self._kept_bytes = kept
        self._residuals = max(self._residuals, kept)
        self._memory.take_peak()  # looking at what is kept is not training's

    def finish(self) -> None:
        """The step is over."""
        self._end_of_baseline()

    def result(self) -> dict[str, Any]:
        """Bytes of this rank; the parts of the baseline are its tensors, and activations all else that was alive."""
        return {
            "source": self._memory.source,
            "peak_bytes": self._peak,
            "baseline_bytes": self._baseline,
            **{f"{name}_bytes": size for name, size in self._held_bytes.items()},
            "activations_bytes": self._baseline - sum(self._held_bytes.values()),
            "workspaces_bytes": self._workspaces,
            "residuals_bytes": self._residuals,
            "resident_peak_bytes": resident_peak_bytes(),
        }

    def _end_of_baseline(self) -> None:
        peak = self._memory.take_peak()
        self._peak = max(self._peak, peak)
        self._baseline = max(self._baseline, peak - self._kept_bytes)


def held_by_training(model: Sequence[Any], optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """The tensors that a rank holds throughout. Views and shared tensors count where they come first."""
    buffers = [buffer for chunk in model for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    return {
        "weights": [parameter.data for chunk in model for parameter in chunk.parameters()],
        "gradients": [buffer.grad_data for buffer in buffers],
        "optimizer_state": list(_optimizer_tensors(optimizer)),
    }


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters (where they are not the model's own) and moments."""
    for part in parts_of(optimizer):
        if part.optimizer is None:
            continue  # a rank without parameters
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind ``tensors``, each piece counted once."""
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _exclusive_bytes(parts: dict[str, list[torch.Tensor]]) -> Iterator[tuple[str, int]]:
    counted: list[torch.Tensor] = []
    before = 0
    for name, tensors in parts.items():
        counted += tensors
        total = nbytes(counted)
        yield name, total - before
        before = total


def resident_peak_bytes() -> int:
    """The most memory that this process had resident since it started, libraries and all."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
