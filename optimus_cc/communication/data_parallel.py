"""Selective stage compression: data-parallel gradients as low-rank factors, on the stages that finish last.

PowerSGD (:mod:`.power_sgd`) over the data-parallel group, on the earliest stages of the pipeline (Optimus-CC). A matrix
costs r (n + m) elements in place of n m. Matrices of one shape are one batch, and all batches of a bucket group travel
together: two means per bucket group, besides Megatron's own for what is not compressed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from optimus_cc.communication.gradient_sync import (
    bucket_groups,
    collective_group,
    extent,
    gradient_scale,
    parameter_names,
)
from optimus_cc.communication.power_sgd import PowerSgd, State
from optimus_cc.communication.probe import Probe
from optimus_cc.config.codec import LowRankConfig
from optimus_cc.config.technique import SelectiveStageCompressionConfig
from optimus_cc.exposure import stages_to_compress
from optimus_cc.wire_size import weight_matrix

_LOGGER = logging.getLogger(__name__)


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
        self.parameters = frozenset(chosen.values())
        ranks = collective_group(group)
        matrices, scales = {}, {}
        for name, parameter in chosen.items():
            bucket = group.param_to_bucket[parameter]
            start, end = extent(parameter, bucket)
            matrices[name] = bucket.grad_data[start:end].view(weight_matrix(parameter.shape))
            # What Megatron leaves is a multiple of the mean: the mean itself, or the sum.
            scales[name] = round(gradient_scale(bucket, group) * ranks.size(), 12)
        feedback = owner.technique.error_feedback
        self._factors = PowerSgd(ranks, matrices, scales, codec, feedback=feedback, seed=seed, probe=owner.probe)

    @property
    def active(self) -> bool:
        return self._owner.active

    @torch.no_grad()
    def start(self) -> None:
        self._factors.start(self._owner.steps)

    @torch.no_grad()
    def finish(self) -> None:
        self._factors.finish()

    def state_dict(self) -> State:
        return self._factors.state_dict()

    def kept(self) -> dict[str, tuple[int, ...]]:
        return self._factors.kept()

    def load_state_dict(self, state: State) -> None:
        self._factors.load_state_dict(state)
