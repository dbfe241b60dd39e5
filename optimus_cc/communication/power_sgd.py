"""PowerSGD (arXiv 1905.13727) of the matrices of one bucket: what each rank computes, and the two means.

With Delta_w a rank's gradient plus its error memory (n x m) and Q a query (r x m, the same on every rank):

    P = orthonormal basis of mean(Delta_w Qᵀ),   R_w = Pᵀ Delta_w,   R = mean(R_w) as it arrived,   out = P R

    memory_w = Delta_w - P S_w - (what rounding added to out),   with S_w this rank's share of R

S_w is R_w but for roundings, and the mean of the shares is R, so out + mean(memory) = mean(Delta), whatever travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from optimus_cc.communication.factor_mean import factor_mean
from optimus_cc.communication.probe import Probe
from optimus_cc.compression.codec import wire_dtype
from optimus_cc.compression.low_rank import private_generator, transposed
from optimus_cc.compression.power_iteration import (
    clear_unless,
    first_factor,
    leave_out,
    masked,
    orthonormal_basis,
    second_factor,
    surely_finite,
    warm_query,
)
from optimus_cc.config.codec import LowRankConfig

State = dict[str, torch.Tensor]


class PowerSgd:
    """The means of matrices over ``ranks``, as low-rank factors.

    Args:
        ranks: over which is averaged.
        matrices: by name; what is found there is replaced by ``scale`` times the approximate mean. All of one dtype.
        scales: by name.
        codec: the factors.
        feedback: keep what is left out for the next step.
        seed: keys the private generators of the queries; the same on every rank.
        probe: coding and decoding are reported to it as spans.
    """

    def __init__(
        self,
        ranks: dist.ProcessGroup,
        matrices: Mapping[str, torch.Tensor],
        scales: Mapping[str, float],
        codec: LowRankConfig,
        *,
        feedback: bool,
        seed: int,
        probe: Probe | None = None,
    ) -> None:
        self._probe = probe or Probe()
        alike: dict[tuple[int, int, float], dict[str, torch.Tensor]] = {}
        for name, matrix in matrices.items():
            alike.setdefault((*matrix.shape, scales[name]), {})[name] = matrix
        self._batches = [
            Batch(batch, key[2], codec, feedback=feedback, seed=seed) for key, batch in sorted(alike.items(), key=str)
        ]
        some = next(iter(matrices.values()))
        sent = wire_dtype(codec.wire_dtype, some.dtype)
        self._lefts = factor_mean(ranks, [batch.left_shape for batch in self._batches], sent, some.device)
        self._rights = factor_mean(ranks, [batch.right_shape for batch in self._batches], sent, some.device)

    def start(self, step: int) -> None:
        """Begin to reduce; does not wait for other ranks."""
        with self._probe.span("codec", "first factors"):
            factors = [batch.project(step) for batch in self._batches]
        self._lefts.start(factors)

    def finish(self) -> None:
        """Leave what arrived in the matrices."""
        lefts = self._lefts.finish()
        with self._probe.span("codec", "second factors"):
            factors = [batch.second(left) for batch, left in zip(self._batches, lefts.arrived, strict=True)]
        self._rights.start(factors)
        rights = self._rights.finish()
        with self._probe.span("codec", "decode"):
            for batch, right, share in zip(self._batches, rights.arrived, rights.shares(), strict=True):
                batch.apply(right, share)

    def state_dict(self) -> State:
        return {name: value for batch in self._batches for name, value in batch.state_dict().items()}

    def kept(self) -> dict[str, tuple[int, ...]]:
        """What :meth:`state_dict` may hold, with shapes."""
        return {name: shape for batch in self._batches for name, shape in batch.kept().items()}

    def load_state_dict(self, state: State) -> None:
        for batch in self._batches:
            batch.load_state_dict(state)


class Batch:
    """k matrices of one shape (n x m) and the factors that stand for them.

    Args:
        gradients: where they are, by name.
        scale: what is left there is this times the mean over the ranks.
    """

    def __init__(
        self, gradients: Mapping[str, torch.Tensor], scale: float, codec: LowRankConfig, *, feedback: bool, seed: int
    ) -> None:
        self._names = list(gradients)
        self._gradients = list(gradients.values())
        self._dtype = self._gradients[0].dtype
        self._scale = scale
        self._feedback = feedback
        self._warm_start = codec.warm_start
        self._seed = seed
        rows, columns = self._gradients[0].shape
        rank = min(codec.rank, rows, columns)
        self.left_shape = (len(gradients), rows, rank)
        self.right_shape = (len(gradients), rank, columns)
        self._memory: torch.Tensor | None = None
        """k x n x m, fp32. Between start and finish it holds the memory plus the gradient."""
        self._query: torch.Tensor | None = None
        """k x r x m, fp32: the second factors of the step before."""
        self._first: torch.Tensor | None = None
        self._basis: torch.Tensor | None = None

    def project(self, step: int) -> torch.Tensor:
        """Delta Qᵀ, k x n x r; the gradients go into the memories."""
        if self._feedback:
            if self._memory is None:
                rows, columns = self._gradients[0].shape
                self._memory = self._gradients[0].new_zeros((len(self._gradients), rows, columns), dtype=torch.float32)
            torch._foreach_add_(list(self._memory.unbind()), self._gradients)
        return first_factor(self._delta(), self._next_query(step))

    def second(self, left: torch.Tensor) -> torch.Tensor:
        """Pᵀ Delta, k x r x m, from the averaged first factors."""
        self._basis = orthonormal_basis(left)
        return second_factor(self._delta(), self._basis)

    def apply(self, right: torch.Tensor, share: torch.Tensor) -> None:
        """Put what the averaged factors stand for into the gradients, and what is left out into the memories.

        Args:
            right: the averaged second factors.
            share: this rank's of them.
        """
        basis, self._basis = self._basis, None
        assert basis is not None
        # A gradient that is not finite on any rank comes out so on every one, and leaves nothing behind.
        finite = surely_finite(right * max(1.0, self._scale))
        if self._warm_start:
            self._query = masked(right, finite, 0.0)
        right = masked(right, finite, torch.nan)
        for gradient, p, r in zip(self._gradients, basis, right * self._scale, strict=True):
            if self._dtype == torch.float32:
                torch.mm(p, r, out=gradient)
            else:
                gradient.copy_(p @ r)
        if self._memory is not None:
            self._remember(basis, right, share, finite)

    def _remember(self, basis: torch.Tensor, right: torch.Tensor, share: torch.Tensor, finite: torch.Tensor) -> None:
        assert self._memory is not None
        if self._dtype != torch.float32:
            # All that the gradients hold now, with its rounding, in place of the mean's part in what is left out below.
            torch._foreach_add_(list(self._memory.unbind()), self._gradients, alpha=-1.0 / self._scale)
            share = share - right
            if self._dtype == torch.float16:  # a sum of finite products can leave its range
                extremes = torch.stack([torch.stack(torch.aminmax(gradient)) for gradient in self._gradients])
                finite = finite & torch.isfinite(extremes).all(dim=1)
        leave_out(self._memory, basis, share, out=self._memory)
        clear_unless(finite, self._memory)

    def state_dict(self) -> State:
        """By name the memories (n x m) and the queries (m x r)."""
        state: State = {}
        for index, name in enumerate(self._names):
            if self._memory is not None:
                state[f"memory.{name}"] = self._memory[index]
            if self._query is not None:
                state[f"query.{name}"] = transposed(self._query[index])
        return state

    def kept(self) -> dict[str, tuple[int, ...]]:
        """What :meth:`state_dict` may hold, with shapes."""
        rows, (_, rank, columns) = self.left_shape[1], self.right_shape
        kept: dict[str, tuple[int, ...]] = {}
        for name in self._names:
            if self._feedback:
                kept[f"memory.{name}"] = (rows, columns)
            if self._warm_start:
                kept[f"query.{name}"] = (columns, rank)
        return kept

    def load_state_dict(self, state: State) -> None:
        queries = (self.right_shape[2], self.right_shape[1])
        self._memory = self._stacked(state, "memory", self._gradients[0].shape) if self._feedback else None
        query = self._stacked(state, "query", queries) if self._warm_start else None
        self._query = None if query is None else transposed(query)

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
        """k x r x m."""
        if not self._warm_start:
            return self._random(step)
        if self._first is None:
            self._first = self._random(0)
        rank, columns = self.right_shape[1:]
        if self._query is None or rank == columns:
            return self._first  # at full rank every orthonormal query sees all of the matrix
        return warm_query(self._query, self._first)

    def _random(self, step: int) -> torch.Tensor:
        """Orthonormal queries of the private generators of (seed, name, step): the same on every rank."""
        device = self._gradients[0].device
        queries = []
        for name in self._names:
            generator = private_generator((self._seed, "sc", name, step), device)
            queries.append(torch.randn(self.right_shape[:0:-1], generator=generator, device=device))
        return transposed(torch.linalg.qr(torch.stack(queries))[0])
