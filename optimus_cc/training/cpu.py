"""What makes Megatron-core run without CUDA. Nothing else knows about it; never imported on a CUDA machine.

Megatron-core names the "cuda" device in its own code: for small tensors (``torch.zeros(..., device="cuda")``), for
the device of its buffers (``torch.cuda.current_device()``), for type names it compares (``Tensor.type()``), and for
the random state that its dropout and recomputation save. :func:`enable` points those at the CPU for this process.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_strided",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
)
_LIKE_FACTORIES = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
_CUDA_ONLY = ("transformer_engine", "apex", "amp_C")
_CPU = torch.device("cpu")
_enabled = False


def enable() -> None:
    """Map CUDA to CPU in this process, for good. Must run before Megatron-core is imported; may run twice.

    Raises:
        RuntimeError: CUDA is in use in this process.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_initialized():  # asking for devices would start the driver, which no forked process can use
        raise RuntimeError("CUDA is already in use in this process: the CPU mode can't be switched on beside it")
    for name in _CUDA_ONLY:
        # Megatron-core takes their kernels wherever they can be imported.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    for name in _FACTORIES + _LIKE_FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _replace_tensor_methods()
    _replace_cuda_functions()
    with _lighter_import():
        _replace_random_state()
    _enabled = True


@contextmanager
def _lighter_import() -> Iterator[None]:
    """For importing Megatron-core: without what a rank on CPU never calls and takes seconds of processor time to load.

    torch.compile loads its compilers as soon as it decorates Megatron-core's fused kernels; wandb is asked for by its
    inference engine.
    """
    torch_compile, wandb = torch.compile, sys.modules.get("wandb")
    torch.compile = _as_it_is  # type: ignore[assignment]
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = torch_compile
        del sys.modules["wandb"]
        if wandb is not None:
            sys.modules["wandb"] = wandb


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """Stands for torch.compile, called or as a decorator with or without options."""
    return function if function is not None else _as_it_is


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return on_cpu


def _replace_tensor_methods() -> None:
    torch_type, torch_to = torch.Tensor.type, torch.Tensor.to

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return torch_type(self, *args, **kwargs)
        return torch_type(self).replace("torch.", "torch.cuda.", 1)

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_CPU if not isinstance(value, bool) and _is_cuda(value) else value for value in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return torch_to(self, *args, **kwargs)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]


class _Stream:
    """Stands where a CUDA stream is waited for; on CPU everything has already happened."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _replace_cuda_functions() -> None:
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    stream = _Stream()
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda *args: nullcontext(),
        "Stream": _Stream,
        "set_device": lambda *args: None,  # not `nothing`: torch.compile treats it unlike those
        "device_memory_used": lambda *args: 0,
        "synchronize": nothing,
        "empty_cache": nothing,
        "reset_peak_memory_stats": nothing,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _replace_random_state() -> None:
    from megatron.core.tensor_parallel import random

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    # Here the two random states are one, so Megatron-core's remark that both changed is always true.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
