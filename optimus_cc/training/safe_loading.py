"""Reading a checkpoint without executing anything that it holds. Without Megatron-core."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from optimus_cc.files import open_regular

_INDEX = ".metadata"
_INDEX_NAMES = {
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
    ),
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    ),
}
"""What the index of a distributed checkpoint may name."""


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """torch.load unpickles tensors and plain values only, whatever its caller asks for."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _INDEX_NAMES:
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which has no place there")
        return super().find_class(module, name)


def read_index(checkpoint: Path) -> dict[str, torch.dtype | None]:
    """The tensors of a distributed checkpoint: name to type; None for what isn't one.

    torch itself unpickles the index without restriction; call this first.

    Raises:
        pickle.UnpicklingError: it holds something else than an index does.
    """
    with open_regular(checkpoint / _INDEX) as file:
        entries = _IndexUnpickler(file).load().state_dict_metadata
    return {
        name: entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in entries.items()
    }
