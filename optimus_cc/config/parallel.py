"""``parallel``: how the model and the batch are laid out over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import PositiveInt, strict


@strict
class ParallelConfig:
    """Tensor x pipeline x data parallelism, and how Megatron-core communicates inside it."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    num_chunks: PositiveInt = 1
    """Virtual stages per pipeline rank; above 1 the interleaved schedule runs."""
    overlap_p2p: bool = False
    """Interleaved schedule only: stage-to-stage messages overlap with computation."""
    batch_p2p: bool = True
    """Sends and receives of one call are posted as one batch. Must be false with overlap_p2p."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks share the sequence between their matrix products, so each holds a part of activations."""
    split_over_tensor_parallel: bool = False
    """Each tensor-parallel rank sends its share of a stage-to-stage message, which all of them hold; lossless."""
    overlap_grad_reduce: bool = False
    """Data-parallel gradient reduction overlaps with the backward pass."""
    distributed_optimizer: bool = False
    """Optimizer state is sharded over the data-parallel ranks (ZeRO-1)."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def num_virtual_stages(self) -> int:
        return self.pipeline_parallel_size * self.num_chunks

    @property
    def label(self) -> str:
        """Short readable name, for example ``tp2_pp2_dp2`` or ``pp4_v2``."""
        sizes = {
            "tp": self.tensor_parallel_size,
            "pp": self.pipeline_parallel_size,
            "dp": self.data_parallel_size,
            "v": self.num_chunks,
        }
        return "_".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "single"

    def problems(self) -> Iterator[Problem]:
        for key in ("sequence_parallel", "split_over_tensor_parallel"):
            if getattr(self, key) and self.tensor_parallel_size == 1:
                yield Problem(
                    f"parallel.{key}",
                    True,
                    "false when parallel.tensor_parallel_size = 1",
                    f"parallel.{key}=false, or raise parallel.tensor_parallel_size",
                )
        if self.num_chunks > 1 and self.pipeline_parallel_size == 1:
            yield Problem(
                "parallel.num_chunks",
                self.num_chunks,
                "1 when parallel.pipeline_parallel_size = 1",
                "raise parallel.pipeline_parallel_size or set parallel.num_chunks=1",
            )
        if self.overlap_p2p and self.num_chunks == 1:
            yield Problem(
                "parallel.overlap_p2p",
                self.overlap_p2p,
                "false with the non-interleaved schedule (parallel.num_chunks = 1)",
                "set parallel.overlap_p2p=false, or raise parallel.num_chunks",
            )
        yield from self.message_problems()

    def message_problems(self) -> Iterator[Problem]:
        """With which ways to send them stage-to-stage messages would go wrong."""
        if self.sequence_parallel and self.split_over_tensor_parallel:
            yield Problem(
                "parallel.split_over_tensor_parallel",
                True,
                "false with parallel.sequence_parallel = true, where every rank sends only its share anyway",
                "parallel.split_over_tensor_parallel=false",
            )
        if self.num_chunks > 1 and self.overlap_p2p and self.batch_p2p:
            yield Problem(
                "parallel.batch_p2p",
                self.batch_p2p,
                "false with parallel.overlap_p2p = true",
                "set parallel.batch_p2p=false",
            )
        if self.num_chunks > 1 and self.pipeline_parallel_size == 2 and not self.overlap_p2p:
            # Previous and next rank are the same rank.
            yield Problem(
                "parallel.overlap_p2p",
                self.overlap_p2p,
                "true, with parallel.batch_p2p = false, when two pipeline stages have several chunks: otherwise "
                "Megatron-core pairs their messages wrongly, and trains on garbage",
                "parallel.overlap_p2p=true parallel.batch_p2p=false",
            )
