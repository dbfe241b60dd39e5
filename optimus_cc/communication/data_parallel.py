"""Selective stage compression: data-parallel gradients as low-rank factors, on the stages that finish last.

PowerSGD (arXiv 1905.13727) over the data-parallel group, on the earliest stages of the pipeline (Optimus-CC). With
Delta a rank's gradient plus its error memory (n x m) and Q a query (m x r, the same on every rank):

    P = orthonormal basis of mean(Delta Q),   Q' = mean(Delta^T P),   out = P Q'^T,   memory = Delta - out

Both means are all-reduces: a matrix costs r (n + m) elements in place of n m. Matrices of one shape are one batch, and
all batches of a bucket group travel together: two collectives per bucket group, besides Megatron's own for what is
not compressed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from optimus_cc.communication.gradient_sync import (
    bucket_groups,
    collective_group,
    extent,
    gradient_scale,
    parameter_names,
)
from optimus_cc.communication.probe import Probe
from optimus_cc.compression.codec import wire_dtype
from optimus_cc.compression.low_rank import private_generator, warm_query
from optimus_cc.config.codec import LowRankConfig
from optimus_cc.config.technique import SelectiveStageCompressionConfig
from optimus_cc.exposure import stages_to_compress
from optimus_cc.wire_size import weight_matrix

_LOGGER = logging.getLogger(__name__)
State = dict[str, torch.Tensor]


class SelectiveStageCompression:
    """The data-parallel gradients of one rank's model.

    Args:
        model: the chunks of this rank.
        technique: what is compressed and how; of which :meth:`TechniqueConfig.problems` has nothing to say.
        seed: keys the private generators of the first queries; the same on every rank.
        left_out: parameters that are reduced elsewhere.
        probe: coding and decoding are reported to it as spans.

    Raises:
        ValueError: the model is not set up as needed, or nothing would be compressed though this stage is among those
            that compress.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        technique: SelectiveStageCompressionConfig,
        seed: int,
        left_out: frozenset[torch.nn.Parameter],
        probe: Probe | None = None,
    ) -> None:
        assert isinstance(technique.codec, LowRankConfig)
        if get_model_config(model[0]).finalize_model_grads_func is None:
            raise ValueError("selective stage compression: set config.finalize_model_grads_func first")
        self.technique = technique
        self.probe = probe or Probe()
        self.steps = 0
        """Steps finished, counted for the warm-up."""
        self.groups: list[tuple[Any, FactoredReduction]] = []
        """Bucket groups of this rank that hold something to compress."""
        groups = bucket_groups(model)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        compressing = stages_to_compress(stages, technique.fraction)
        if compressing == 0:
            _LOGGER.warning("sc.fraction=%s of %d stages is none: nothing is compressed", technique.fraction, stages)
        if parallel_state.get_pipeline_model_parallel_rank() >= compressing:
            return
        names = parameter_names(model)
        for group in groups:
            chosen = {
                names[parameter]: parameter
                for bucket in group.buckets
                for parameter in bucket.params_list
                if parameter not in left_out
                and "position_embeddings" not in names[parameter]
                and technique.compresses(*weight_matrix(parameter.shape))
            }
            if chosen:
                self.groups.append((group, FactoredReduction(self, group, chosen, technique.codec, seed)))
        if not self.groups:
            raise ValueError(
                f"selective stage compression: two factors of rank {technique.codec.rank} save less than "
                f"min_compression_ratio={technique.min_compression_ratio} on every matrix of this stage"
            )

    @property
    def active(self) -> bool:
        """Whether the warm-up is over."""
        return self.steps >= self.technique.warmup_steps

    def end_step(self) -> None:
        """Count a step, after its gradients were reduced."""
        self.steps += 1

    def state_dict(self) -> State:
        """The step count, and by parameter name the error memories (fp32, n x m) and queries (fp32, m x r)."""
        state: State = {"steps": torch.tensor(self.steps)}
        for _, reduction in self.groups:
            state |= reduction.state_dict()
        return state

    def kept(self) -> dict[str, tuple[int, ...]]:
        """What :meth:`state_dict` may hold on this rank, with shapes."""
        kept: dict[str, tuple[int, ...]] = {"steps": ()}
        for _, reduction in self.groups:
            kept |= reduction.kept()
        return kept

    def load_state_dict(self, state: State) -> None:
        """Continue from ``state``; what it does not hold starts afresh."""
        self.steps = int(state.get("steps", 0))
        for _, reduction in self.groups:
            reduction.load_state_dict(state)


class FactoredReduction:
    """The matrices of one bucket group that travel as factors; a :class:`~.gradient_sync.Compressor`."""

    def __init__(
        self,
        owner: SelectiveStageCompression,
        group: Any,
        chosen: dict[str, torch.nn.Parameter],
        codec: LowRankConfig,
        seed: int,
    ) -> None:
        self._owner = owner
        self._ranks = collective_group(group)
        self.parameters = frozenset(chosen.values())
        shapes: dict[tuple[int, int, torch.dtype, float], dict[str, torch.Tensor]] = {}
        for name, parameter in chosen.items():
            bucket = group.param_to_bucket[parameter]
            start, end = extent(parameter, bucket)
            rows, columns = weight_matrix(parameter.shape)
            # What Megatron leaves is a multiple of the mean: the mean itself, or the sum.
            scale = round(gradient_scale(bucket, group) * self._ranks.size(), 12)
            key = (rows, columns, bucket.grad_data.dtype, scale)
            shapes.setdefault(key, {})[name] = bucket.grad_data[start:end].view(rows, columns)
        feedback = owner.technique.error_feedback
        self._batches = [
            _Batch(gradients, key[3], codec, feedback, seed) for key, gradients in sorted(shapes.items(), key=str)
        ]
        self._wire_dtype = wire_dtype(codec.wire_dtype, next(iter(shapes))[2])
        self._flat: torch.Tensor | None = None
        self._handle: Any = None

    @property
    def active(self) -> bool:
        return self._owner.active

    @torch.no_grad()
    def start(self) -> None:
        step = self._owner.steps
        with self._owner.probe.span("codec", "first factors"):
            factors = [batch.project(step) for batch in self._batches]
        self._all_reduce_mean(factors)

    @torch.no_grad()
    def finish(self) -> None:
        lefts = self._arrived([batch.left_shape for batch in self._batches])
        with self._owner.probe.span("codec", "second factors"):
            factors = [batch.second(left) for batch, left in zip(self._batches, lefts, strict=True)]
        self._all_reduce_mean(factors)
        rights = self._arrived([batch.right_shape for batch in self._batches])
        with self._owner.probe.span("codec", "decode"):
            for batch, right in zip(self._batches, rights, strict=True):
                batch.apply(right)

    def state_dict(self) -> State:
        return {name: value for batch in self._batches for name, value in batch.state_dict().items()}

    def kept(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for batch in self._batches for name, shape in batch.kept().items()}

    def load_state_dict(self, state: State) -> None:
        for batch in self._batches:
            batch.load_state_dict(state)

    def _all_reduce_mean(self, factors: Sequence[torch.Tensor]) -> None:
        """Begin to average ``factors`` over the ranks, all in one collective."""
        # Divided before they are added: half-precision sums would overflow.
        flat = torch.cat([factor.flatten() for factor in factors]).div_(self._ranks.size()).to(self._wire_dtype)
        self._flat, self._handle = flat, dist.all_reduce(flat, group=self._ranks, async_op=True)

    def _arrived(self, shapes: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Wait for the collective; the averaged factors in fp32."""
        assert self._flat is not None
        self._handle.wait()
        flat, self._flat, self._handle = self._flat.float(), None, None
        return [
            part.view(shape) for part, shape in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)
        ]


class _Batch:
    """k matrices of one shape (n x m) and the factors that stand for them.

    Args:
        gradients: views into the bucket, by parameter name.
        scale: what is left in the bucket is this times the mean over the ranks.
    """

    def __init__(
        self, gradients: dict[str, torch.Tensor], scale: float, codec: LowRankConfig, feedback: bool, seed: int
    ) -> None:
        self._names = list(gradients)
        self._gradients = list(gradients.values())
        self._scale = scale
        self._feedback = feedback
        self._warm_start = codec.warm_start
        self._seed = seed
        rows, columns = self._gradients[0].shape
        rank = min(codec.rank, rows, columns)
        self.left_shape = (len(gradients), rows, rank)
        self.right_shape = (len(gradients), columns, rank)
        self._memory: torch.Tensor | None = None
        """k x n x m, fp32. Between start and finish it holds the memory plus the gradient."""
        self._query: torch.Tensor | None = None
        """k x m x r, fp32: the second factors of the step before."""
        self._first: torch.Tensor | None = None
        self._basis: torch.Tensor | None = None

    def project(self, step: int) -> torch.Tensor:
        """Delta Q, k x n x r; the gradients go into the memories."""
        if self._feedback:
            if self._memory is None:
                rows, columns = self._gradients[0].shape
                self._memory = self._gradients[0].new_zeros((len(self._gradients), rows, columns), dtype=torch.float32)
            torch._foreach_add_(list(self._memory.unbind()), self._gradients)
        return torch.bmm(self._delta(), self._next_query(step))

    def second(self, left: torch.Tensor) -> torch.Tensor:
        """Delta^T P, k x m x r, from the averaged first factors."""
        self._basis = torch.linalg.qr(left)[0]
        return torch.bmm(self._delta().transpose(1, 2), self._basis)

    def apply(self, right: torch.Tensor) -> None:
        """Put what the averaged factors stand for into the bucket, and what they leave out into the memories."""
        basis, self._basis = self._basis, None
        assert basis is not None
        # A gradient that is not finite on any rank comes out so on every one, and leaves nothing behind.
        spoilt = ~torch.isfinite(right).all(dim=2).all(dim=1)[:, None, None]
        scaled = right if self._scale == 1.0 else right * self._scale
        for gradient, p, q in zip(self._gradients, basis, scaled, strict=True):
            if gradient.dtype == torch.float32:
                torch.mm(p, q.t(), out=gradient)
            else:
                gradient.copy_(p @ q.t())
        if self._memory is not None:
            torch._foreach_add_(list(self._memory.unbind()), self._gradients, alpha=-1.0 / self._scale)
            self._memory.masked_fill_(spoilt, 0.0)
        if self._warm_start:
            self._query = right.masked_fill(spoilt, 0.0)

    def state_dict(self) -> State:
        state: State = {}
        for index, name in enumerate(self._names):
            if self._memory is not None:
                state[f"memory.{name}"] = self._memory[index]
            if self._query is not None:
                state[f"query.{name}"] = self._query[index]
        return state

    def kept(self) -> dict[str, tuple[int, ...]]:
        """What :meth:`state_dict` may hold, with shapes."""
        memory, query = self.left_shape[1], self.right_shape[1:]
        kept: dict[str, tuple[int, ...]] = {}
        for name in self._names:
            if self._feedback:
                kept[f"memory.{name}"] = (memory, query[0])
            if self._warm_start:
                kept[f"query.{name}"] = query
        return kept

    def load_state_dict(self, state: State) -> None:
        self._memory = self._stacked(state, "memory", self._gradients[0].shape) if self._feedback else None
        self._query = self._stacked(state, "query", self.right_shape[1:]) if self._warm_start else None

    def _stacked(self, state: State, kind: str, shape: Sequence[int]) -> torch.Tensor | None:
        found = [state.get(f"{kind}.{name}") for name in self._names]
        if all(value is None for value in found):
            return None
        device = self._gradients[0].device
        zeros = torch.zeros(tuple(shape), device=device)
        return torch.stack([zeros if value is None else value.to(device) for value in found])

    def _delta(self) -> torch.Tensor:
        return torch.stack(self._gradients).float() if self._memory is None else self._memory

    def _next_query(self, step: int) -> torch.Tensor:
        """k x m x r."""
        if not self._warm_start:
            return self._random(step)
        if self._first is None:
            self._first = self._random(0)
        rank, columns = self.right_shape[2], self.right_shape[1]
        if self._query is None or rank == columns:
            return self._first  # at full rank every orthonormal query sees all of the matrix
        return warm_query(self._query, self._first)

    def _random(self, step: int) -> torch.Tensor:
        """Orthonormal queries of the private generators of (seed, parameter, step): the same on every rank."""
        device = self._gradients[0].device
        queries = []
        for name in self._names:
            generator = private_generator((self._seed, "sc", name, step), device)
            queries.append(torch.randn(self.right_shape[1:], generator=generator, device=device))
        orthonormal: torch.Tensor = torch.linalg.qr(torch.stack(queries))[0]
        return orthonormal
