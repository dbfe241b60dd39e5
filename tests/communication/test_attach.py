"""attach() on a model that somebody else's loop trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimus_cc.config import RunConfig
from optimus_cc.config.technique import CompressedBackpropagationConfig, FusedEmbeddingConfig, TechniqueConfig
from tests.configurations import SEQUENCE, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens

QUERY = ("codec.draws", "codec.query")


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


def _continued(config: RunConfig) -> tuple[list[str], list[float], list[float], list[float]]:
    """Names of the state, and losses of a training that goes on: undisturbed, from its state, and without it."""
    import copy

    def losses(state: dict[str, torch.Tensor] | None) -> list[float]:
        trainer.attachment.load_state_dict({} if state is None else state)
        for chunk, weights in zip(trainer.model, before, strict=True):
            chunk.load_state_dict(weights)
        trainer.optimizer.reload_model_params()
        batches = trainer.batches_for_chunks(random_tokens(config), 2)
        return [float(trainer.mean_loss(trainer.train_step(batches)[0])) for _ in range(3)]

    trainer = _trainer(config)
    batches = trainer.batches_for_chunks(random_tokens(config), 0)
    for _ in range(2):
        trainer.train_step(batches)
    before = [copy.deepcopy(chunk.state_dict()) for chunk in trainer.model]
    state = {key: value.clone() for key, value in trainer.attachment.state_dict().items()}
    return sorted(state), losses(state), losses(state), losses(None)


@pytest.mark.megatron
def test_state_is_named_by_boundary_and_decides_how_training_goes_on(ranks: RankPool) -> None:
    technique = low_rank(residual="carry", epilogue_only=False)
    stateless = {
        "name": "sgd",
        "learning_rate": 1.0,
        "momentum": 0.0,
        "decay_style": "constant",
        "warmup_fraction": 0.0,
    }
    config = tiny("pp4_v2", technique, optimizer=stateless, steps=20)
    results = ranks.run(4, _continued, config)
    names = {name for result in results for name in result[0]}
    assert names == {"owner"} | {f"backward.{boundary}.{part}" for boundary in range(7) for part in ("memory", *QUERY)}
    for _, first, second, without in results:
        assert first == second
        assert first[0] == without[0], "the first loss is computed before anything of it has had an effect"
        assert first[1:] != without[1:]


def _loop_sets_its_own_finalizer(config: RunConfig) -> bool:
    """Megatron-LM's training loop sets finalize_model_grads_func after the model was built, and so after attach()."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    trainer = _trainer(config)
    model_config = get_model_config(trainer.model[0])
    calls = []

    def own(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        finalize_model_grads(*args, **kwargs)

    model_config.finalize_model_grads_func = own
    trainer.train_step(trainer.batches_for_chunks(random_tokens(config), 0))
    embedding = [
        parameter.main_grad.clone()
        for chunk in trainer.model
        for name, parameter in chunk.named_parameters()
        if "word_embeddings" in name or "output_layer.weight" in name
    ]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, embedding)
    copies = [one for some in gathered for one in some]
    same = len(copies) == 4 and all(torch.equal(one, copies[0]) for one in copies)
    trainer.attachment.detach()
    return calls == [1] and same and model_config.finalize_model_grads_func is own


@pytest.mark.megatron
@pytest.mark.parametrize("fused", [False, True])
def test_loop_may_set_its_finalizer_after_attach(ranks: RankPool, fused: bool) -> None:
    technique = {**low_rank(), "fe": {"enabled": fused}}
    layout = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    assert all(ranks.run(4, _loop_sets_its_own_finalizer, tiny(layout, technique)))


def _refusals(config: RunConfig, techniques: list[TechniqueConfig], **settings: Any) -> list[str]:
    from megatron.core.utils import get_model_config

    from optimus_cc.communication.attach import attach

    trainer = _trainer(config)
    trainer.attachment.detach()
    for name, value in settings.items():
        setattr(get_model_config(trainer.model[0]), name, value)
    messages = []
    for technique in techniques:
        with pytest.raises(ValueError, match=r"allowed is|must not be") as caught:
            attach(technique, trainer.model)
        messages.append(str(caught.value))
    return messages


CB = tiny("pp4", low_rank()).technique
IDENTITY = TechniqueConfig(cb=CompressedBackpropagationConfig(enabled=True))


@pytest.mark.megatron
def test_what_can_not_work_is_refused_with_the_reason(ranks: RankPool) -> None:
    """As when a run is composed."""
    (messages,) = ranks.run(1, _refusals, tiny("single"), [CB, TechniqueConfig(fe=FusedEmbeddingConfig(enabled=True))])
    assert all("more than one pipeline stage" in message for message in messages)
    for messages in ranks.run(2, _refusals, tiny("pp2"), [IDENTITY]):
        assert "a codec that compresses" in messages[0]
    for settings in ({"overlap_p2p_comm": False}, {"batch_p2p_comm": True}):
        for messages in ranks.run(2, _refusals, tiny("pp2_v2_overlap"), [TechniqueConfig(), CB], **settings):
            assert all("batch_p2p" in message and "overlap_p2p" in message for message in messages)
    for name in ("cuda_graph_impl", "cuda_graph_scope"):
        capturing: dict[str, Any] = {name: "full_iteration"}
        (messages,) = ranks.run(1, _refusals, tiny("single"), [TechniqueConfig()], **capturing)
        assert "a plan decides at every step" in messages[0]


def _too_few_to_flush(config: RunConfig, flushing: TechniqueConfig) -> list[str]:
    """What is raised by evaluation and by training, with so few messages that flush sends every one uncompressed."""
    from optimus_cc.communication.attach import attach

    trainer = _trainer(config)
    trainer.attachment.detach()
    trainer.attachment = attach(flushing, trainer.model)
    trainer.validate(trainer.batches_for_chunks(random_tokens(config), 0), 1)
    messages = []
    for _ in range(2):
        with pytest.raises(ValueError, match="nothing would be compressed") as caught:
            trainer.train_step(trainer.batches_for_chunks(random_tokens(config), 0))
        messages.append(str(caught.value))
    return messages


@pytest.mark.megatron
def test_flush_that_compresses_nothing_is_refused_when_it_trains(ranks: RankPool) -> None:
    flushing = tiny("pp4", low_rank(residual="flush")).technique
    for messages in ranks.run(2, _too_few_to_flush, tiny("pp2"), flushing):
        assert all("technique.cb.residual" in message for message in messages)
