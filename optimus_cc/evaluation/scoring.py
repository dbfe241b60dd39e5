"""Log-probabilities of given tokens under a Megatron-core model, at any tensor-, pipeline- and data-parallel size.

Rows go through Megatron-core's forward-only schedules, longest first, and shared out over the data-parallel replicas.
The output layer is applied to those positions alone whose prediction is asked for, and the softmax is taken over the
vocabulary's shards where they are: logits are never gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from optimus_cc.communication.gradient_sync import unwrapped
from optimus_cc.evaluation.windows import Part
from optimus_cc.training.backend import Backend

MICROBATCHES_PER_STAGE = 4
"""How many follow each other through a pipeline before it runs empty."""


@dataclass(frozen=True)
class Score:
    """Of all tokens of a request together."""

    log_probability: float
    """Natural logarithm."""
    greedy: bool
    """Whether each token is the likeliest one where it stands; of equally likely ones, that of the lowest id."""


@dataclass(frozen=True)
class _Row:
    """Inputs that are computed once, for all requests that share them."""

    inputs: tuple[int, ...]
    wanted: list[tuple[int, tuple[int, ...]]]
    """(request, targets)."""


@dataclass(frozen=True)
class _Batch:
    """A micro-batch: [batch, sequence] inputs, padded on the right, and the predictions that are asked for."""

    tokens: torch.Tensor
    rows: torch.Tensor
    """[n]: of each prediction, its row,"""
    positions: torch.Tensor
    """[n]: its position in the row,"""
    targets: torch.Tensor
    """[n]: and the token whose probability is asked for."""
    requests: torch.Tensor
    """[n]: the request that asks."""


class Scorer:
    """Scores requests with the model that this rank holds a part of. All methods are collective over all ranks.

    Args:
        model: this rank's only chunk, in evaluation mode.
        backend: this rank's.
        vocabulary_size: tokens that exist; the rows that pad the embedding get no probability.
        batch_size: rows of a micro-batch.
        progress: called after each pass with the number of rows that this rank has done, and how many it has.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Backend,
        *,
        vocabulary_size: int,
        batch_size: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._vocabulary_size = vocabulary_size
        self._batch_size = batch_size
        self._progress = progress
        self._asked: _Batch | None = None
        self._is_last = parallel_state.is_pipeline_last_stage()
        if self._is_last:
            inner: Any = unwrapped(model)
            inner.output_layer.register_forward_pre_hook(self._select)

    def score(self, requests: Sequence[Sequence[Part]]) -> list[Score]:
        """One score for each request; every rank gives the same requests and gets the same scores.

        Args:
            requests: each as what :mod:`optimus_cc.evaluation.windows` makes of it.
        """
        total = torch.zeros(len(requests), 2, dtype=torch.float64)  # log-probability, tokens that are not the likeliest
        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        rows = _rows(requests)[replica::replicas]
        speaks = self._is_last and parallel_state.get_tensor_model_parallel_rank() == 0
        done = 0
        for group in self._groups(rows):
            batches = [_batch(part, len(group[0][0].inputs), self._backend.device) for part in group]
            results = self._forward(batches)
            if speaks:
                for batch, result in zip(batches, results, strict=True):
                    total.index_add_(0, batch.requests, result.double().cpu())
            done += sum(map(len, group))
            self._progress(done, len(rows))
        dist.all_reduce(total, group=self._backend.control_group)
        return [Score(log_probability, misses == 0) for log_probability, misses in total.tolist()]

    def _groups(self, rows: list[_Row]) -> Iterator[list[list[_Row]]]:
        """Micro-batches that are of one size, and are padded to one length, in each pass through the pipeline."""
        size, stages = self._batch_size, parallel_state.get_pipeline_model_parallel_world_size()
        most = MICROBATCHES_PER_STAGE * stages if stages > 1 else 1
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        for _, same in itertools.groupby(batches, key=len):
            yield from _chunks(list(same), most)

    def _forward(self, batches: list[_Batch]) -> list[torch.Tensor]:
        """[n, 2] for each micro-batch: log-probability, and 1 where another token is likelier; none before the end."""
        rows, length = batches[0].tokens.shape
        with torch.no_grad():
            found: list[torch.Tensor] = get_forward_backward_func()(
                forward_step_func=self._step,
                data_iterator=iter(batches),
                model=self._model,
                num_microbatches=len(batches),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=True,
                collect_non_loss_data=True,
            )
        return found

    def _step(self, batches: Iterator[_Batch], model: Any) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        batch = self._asked = next(batches)
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        output = model(batch.tokens, positions, None)

        def finish(logits: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            return self._finish(logits[0], batch.targets)

        return output, finish

    def _select(self, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Before the output layer: [sequence, batch, hidden] to [n, 1, hidden], the predictions that are asked for."""
        assert self._asked is not None
        hidden, *rest = inputs
        return hidden[self._asked.positions, self._asked.rows].unsqueeze(1), *rest

    def _finish(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        log_probability, likeliest = target_log_probabilities(logits, targets, first, self._vocabulary_size, group)
        return torch.stack([log_probability, (likeliest != targets).float()], dim=-1)


def target_log_probabilities(
    logits: torch.Tensor, targets: torch.Tensor, first: int, vocabulary_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax at ``targets``, and the likeliest tokens, over a vocabulary that ``group`` holds in shards.

    Args:
        logits: [n, shard] of this rank's tokens.
        targets: [n].
        first: the id of this rank's first token.
        vocabulary_size: ids from here on are padding, and have no part in it.

    Returns:
        [n] in fp32, and [n] ids.
    """
    logits = logits.float()
    real = max(0, min(logits.shape[1], vocabulary_size - first))
    logits[:, real:] = -torch.inf
    own_highest, own_index = logits.max(dim=-1)
    highest = own_highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    local = targets - first
    here = (local >= 0) & (local < real)
    shifted = logits.sub_(highest.unsqueeze(-1))
    at_target = shifted.gather(1, local.clamp(0, logits.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
    at_target = torch.where(here, at_target, 0.0)
    sums = torch.stack([at_target, shifted.exp_().sum(dim=-1)])
    dist.all_reduce(sums, group=group)
    likeliest = torch.where(own_highest == highest, own_index + first, torch.iinfo(torch.int64).max)
    dist.all_reduce(likeliest, op=dist.ReduceOp.MIN, group=group)
    return sums[0] - sums[1].log(), likeliest


def _rows(requests: Sequence[Sequence[Part]]) -> list[_Row]:
    """The different inputs of all requests, longest first; ties in one order for all ranks."""
    rows: dict[tuple[int, ...], _Row] = {}
    for request, parts in enumerate(requests):
        for part in parts:
            rows.setdefault(part.inputs, _Row(part.inputs, [])).wanted.append((request, part.targets))
    return sorted(rows.values(), key=lambda row: (-len(row.inputs), row.inputs))


def _batch(rows: Sequence[_Row], length: int, device: torch.device) -> _Batch:
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    asked = []
    for index, row in enumerate(rows):
        tokens[index, : len(row.inputs)] = torch.tensor(row.inputs)
        for request, targets in row.wanted:
            start = len(row.inputs) - len(targets)
            asked += [(index, start + offset, target, request) for offset, target in enumerate(targets)]
    entries = torch.tensor(asked).t()
    places, positions, targets = entries[:3].to(device)
    return _Batch(tokens.to(device), places, positions, targets, entries[3])


def _chunks(values: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
