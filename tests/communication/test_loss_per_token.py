"""Gradients weighted by tokens (Megatron-core's calculate_per_token_loss) through every technique at full rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optimus_cc.config import RunConfig
from optimus_cc.config.technique import TechniqueConfig
from tests.configurations import SEQUENCE, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import Batch, backend_in_world, random_tokens

PP2_DP2 = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
CB = low_rank(10**6, epilogue_only=False)
FE = {"fe": {"enabled": True}}
SC = {
    "sc": {
        "enabled": True,
        "fraction": 1.0,
        "codec": {"name": "low_rank", "rank": 10**6},
        "min_compression_ratio": 1e-3,
    }
}
TECHNIQUES = {"cb": CB, "fe": FE, "sc": SC, "cb fe sc": {**CB, **FE, **SC}}


def _masked(batches: Iterator[Batch], replica: int) -> Iterator[Batch]:
    """Each micro-batch of each replica counts another number of tokens."""
    for index, batch in enumerate(batches):
        counted = 1 + (5 * index + 3 * replica) % SEQUENCE
        yield {**batch, "loss_mask": (torch.arange(SEQUENCE) < counted).float().expand(batch["tokens"].shape)}


def _forward_step(batches: Iterator[Batch], model: Any) -> Any:
    batch = next(batches)

    def loss(output: torch.Tensor) -> Any:
        total = (output.float() * batch["loss_mask"]).sum()
        return total, batch["loss_mask"].sum().int(), {"loss": total.detach().clone()}

    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss


def _differences(config: RunConfig, techniques: dict[str, TechniqueConfig]) -> dict[str, float]:
    """By technique: the largest relative difference of a gradient from that of Megatron-core alone."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from optimus_cc.communication.attach import attach
    from optimus_cc.training import loop, model
    from optimus_cc.training.backend import Backend

    original = model.transformer_config

    def per_token(config: RunConfig, backend: Backend) -> Any:
        transformer = original(config, backend)
        transformer.calculate_per_token_loss = True
        return transformer

    model.transformer_config = per_token
    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    trainer.attachment.detach()
    (chunk,) = trainer.model
    replica = parallel_state.get_data_parallel_rank()

    def gradients(function: Any) -> dict[str, torch.Tensor]:
        chunk.zero_grad_buffer()
        function(
            forward_step_func=_forward_step,
            data_iterator=_masked(random_tokens(config)(0), replica),
            model=chunk,
            num_microbatches=config.num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=config.training.micro_batch_size,
            forward_only=False,
        )
        return {name: parameter.main_grad.clone() for name, parameter in chunk.module.named_parameters()}

    plain = gradients(get_forward_backward_func())
    assert all(gradient.any() for gradient in plain.values())
    worst = {}
    for name, technique in techniques.items():
        attachment = attach(technique, trainer.model)
        found = gradients(attachment.forward_backward_func)
        attachment.detach()
        worst[name] = max(float((found[key] - value).norm() / value.norm()) for key, value in plain.items())
    return worst


@pytest.mark.megatron
@pytest.mark.parametrize("flags", [{}, {"overlap_grad_reduce": True}], ids=["plain", "overlap"])
def test_tokens_weigh_the_same(ranks: RankPool, flags: dict[str, Any]) -> None:
    techniques = {name: tiny(PP2_DP2, {"name": "test", **nodes}).technique for name, nodes in TECHNIQUES.items()}
    for worst in ranks.run(4, _differences, tiny(PP2_DP2, parallel=flags), techniques):
        assert worst.keys() == TECHNIQUES.keys()
        assert max(worst.values()) < 1e-4, worst
