"""attach() on a model that somebody else's loop trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimus_cc.config import RunConfig
from tests.configurations import SEQUENCE, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens


def _trainer(config: RunConfig) -> Any:
    from optimus_cc.training import loop

    return loop.Trainer.build(config, backend_in_world(config), VOCABULARY)


def _attach_and_detach(config: RunConfig) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from optimus_cc.communication.attach import attach

    trainer = _trainer(config)
    trainer.attachment.detach()
    finalize = get_model_config(trainer.model[0]).finalize_model_grads_func
    arguments = {
        "forward_step_func": trainer._forward_step,
        "model": trainer.model[0],
        "num_microbatches": config.num_microbatches,
        "seq_length": SEQUENCE,
        "micro_batch_size": config.training.micro_batch_size,
        "forward_only": False,
    }

    def gradients(function: Any) -> torch.Tensor:
        for chunk in trainer.model:
            chunk.zero_grad_buffer()
        function(data_iterator=random_tokens(config)(0), **arguments)
        return torch.cat([p.main_grad.flatten() for p in trainer.model[0].parameters()]).clone()

    before = gradients(get_forward_backward_func())
    handle = attach(config.technique, trainer.model, seed=1)
    attached = gradients(handle.forward_backward_func)
    traffic = {name: (count.logical_bytes, count.wire_bytes) for name, count in handle.traffic().items()}
    handle.detach()
    after = gradients(get_forward_backward_func())
    restored = get_model_config(trainer.model[0]).finalize_model_grads_func is finalize
    return {
        "unchanged": torch.equal(before, after) and restored,
        "compressed": not torch.equal(before, attached),
        "traffic": traffic,
    }


@pytest.mark.megatron
def test_detach_gives_back_megatrons_behaviour(ranks: RankPool) -> None:
    results = ranks.run(4, _attach_and_detach, tiny("pp4", low_rank()))
    assert all(result["unchanged"] for result in results)
    assert any(result["compressed"] for result in results)
    logical, wire = (sum(result["traffic"]["pipeline_backward"][index] for result in results) for index in (0, 1))
    assert 0 < wire < logical


def _state_round_trip(config: RunConfig) -> bool:
    """Two trainers that share state continue alike; one that lacks it does not, where there is state."""
    trainer = _trainer(config)
    batches = trainer.batches_for_chunks(random_tokens(config), 0)
    for _ in range(2):
        trainer.train_step(batches)
    state = {key: value.clone() for key, value in trainer.attachment.state_dict().items()}
    trainer.attachment.load_state_dict({})
    emptied = trainer.attachment.state_dict()
    trainer.attachment.load_state_dict(state)
    loaded = trainer.attachment.state_dict()
    assert not emptied
    return loaded.keys() == state.keys() and all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.megatron
def test_state_is_named_by_boundary_and_comes_back(ranks: RankPool) -> None:
    assert all(ranks.run(4, _state_round_trip, tiny("pp4_v2", low_rank(residual="carry"))))


def _attach_on_one_stage(config: RunConfig) -> str:
    from optimus_cc.communication.attach import attach

    trainer = _trainer(config)
    technique = tiny("pp2", low_rank()).technique
    try:
        attach(technique, trainer.model)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.megatron
def test_one_stage_is_refused_with_the_reason(ranks: RankPool) -> None:
    assert "more than one pipeline stage" in ranks.run(1, _attach_on_one_stage, tiny("single"))[0]
