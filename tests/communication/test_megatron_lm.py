"""attach_to_megatron_lm() on a module that asks for the forward-backward function as Megatron-LM's loop does.

The loop itself is run by ``tests/test_examples.py``, where it can be imported.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimus_cc.config import RunConfig
from tests.configurations import SEQUENCE, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens


def _loop_module() -> Any:
    """A stand-in for ``megatron.training.training``: the name that is replaced, and how it is called."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    package, loop = types.ModuleType("megatron.training"), types.ModuleType("megatron.training.training")
    vars(package)["training"] = loop
    vars(loop)["get_forward_backward_func"] = lambda schedule_pg_collection=None: get_forward_backward_func()
    sys.modules.update({package.__name__: package, loop.__name__: loop})
    return loop


def _gradients(config: RunConfig, trainer: Any) -> Callable[..., torch.Tensor]:
    def gradients(function: Callable[..., Any], **changes: Any) -> torch.Tensor:
        for chunk in trainer.model:
            chunk.zero_grad_buffer()
        function(
            **{
                "forward_step_func": trainer._forward_step,
                "data_iterator": random_tokens(config)(0),
                "model": trainer.model,
                "num_microbatches": config.num_microbatches,
                "seq_length": SEQUENCE,
                "micro_batch_size": config.training.micro_batch_size,
                "forward_only": False,
                "p2p_communicator": None,
                "pg_collection": None,
                **changes,
            }
        )
        return torch.cat([p.main_grad.flatten() for p in trainer.model[0].parameters()]).clone()

    return gradients


def _in_the_loop(config: RunConfig) -> dict[str, Any]:
    from optimus_cc import attach, attach_to_megatron_lm
    from optimus_cc.training.loop import Trainer

    trainer = Trainer.build(config, backend_in_world(config), VOCABULARY)
    trainer.attachment.detach()
    gradients = _gradients(config, trainer)
    loop = _loop_module()
    original = loop.get_forward_backward_func
    untouched = gradients(original())
    direct = attach(config.technique, trainer.model, seed=3)
    expected = gradients(direct.forward_backward_func)
    direct.detach()

    attached: list[Any] = []
    handle = attach_to_megatron_lm(config.technique, seed=3, on_attach=attached.append)
    function = loop.get_forward_backward_func(schedule_pg_collection=None)
    with pytest.raises(RuntimeError, match="has not started"):
        handle.plan.traffic()
    in_the_loop = gradients(function)
    training = handle.plan.traffic()
    evaluation_function = loop.get_forward_backward_func(schedule_pg_collection=None)
    with torch.no_grad():
        gradients(evaluation_function, forward_only=True)
    evaluation = handle.plan.traffic()
    with pytest.raises(ValueError, match="p2p_communicator must be None"):
        gradients(function, p2p_communicator=object())
    handle.detach()
    return {
        "as attached directly": torch.equal(in_the_loop, expected) and not torch.equal(in_the_loop, untouched),
        "attached once": attached == [handle.plan],
        "given back": loop.get_forward_backward_func is original and torch.equal(gradients(original()), untouched),
        "forward bytes": (training["pipeline_forward"].wire_bytes, evaluation["pipeline_forward"].wire_bytes),
        "backward bytes in evaluation": evaluation["pipeline_backward"].wire_bytes,
    }


@pytest.mark.megatron
def test_the_loop_runs_with_the_plan_and_is_given_back(ranks: RankPool) -> None:
    config = tiny("pp2", low_rank())
    first, last = ranks.run(2, _in_the_loop, config)
    for result in (first, last):
        assert result["as attached directly"]
        assert result["attached once"]
        assert result["given back"]
        assert result["backward bytes in evaluation"] == 0
    message = SEQUENCE * config.training.micro_batch_size * config.model.hidden_size * 4
    assert first["forward bytes"] == (config.num_microbatches * message,) * 2
