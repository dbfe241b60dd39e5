"""What the layer holds between two messages: error memories and factors, and nothing else of a message's size.

A dispatch mode sees every tensor that is made while the layer works; a weak reference to its storage tells whether
it is still there when the layer has done its part of one message.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimus_cc.config import RunConfig
from tests.configurations import HIDDEN, SEQUENCE, VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens

MESSAGE_BYTES = SEQUENCE * 2 * HIDDEN * 4
PATIENCE_S = 10.0
"""Waited once in a test that finds something, never in one that does not."""
WIDE = 64
SMALLEST_MATRIX_BYTES = WIDE * WIDE * 4
"""Of those that SC compresses below; all factors of a stage are smaller than that at rank 1."""


class Watch(TorchDispatchMode):
    """Storages of at least ``nbytes`` that were made inside."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._made: dict[int, StorageWeakRef] = {}
        self.made = self.calls = 0
        self.left: list[int] = []
        """For each call that left something: how many storages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(tensor).cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if storage.cdata not in given and tensor.untyped_storage().nbytes() >= self._nbytes:
                self._made[storage.cdata] = storage
                self.made += 1
        return result

    def _stays(self) -> bool:
        """Whether anything is left for good: gloo's threads let go of a tensor shortly after its transfer."""
        deadline = time.monotonic() + (0.0 if self.left else PATIENCE_S)
        while True:
            self._made = {key: storage for key, storage in self._made.items() if not storage.expired()}
            if not self._made or time.monotonic() >= deadline:
                return bool(self._made)
            time.sleep(0.001)

    def around(self, owner: type, name: str, may_stay: Callable[[Any], Iterable[torch.Tensor]]) -> None:
        """Watch a method: what it returns and what ``may_stay`` names may outlive a call."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(this: Any, *args: Any, **kwargs: Any) -> Any:
            with self:
                result = original(this, *args, **kwargs)
            for tensor in (*_tensors(result), *may_stay(this)):
                self._made.pop(_storage(tensor).cdata, None)
            self.calls += 1
            if self._stays():
                self.left.append(len(self._made))
            return result

        setattr(owner, name, watched)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _memories(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [value for key, value in state.items() if "memory" in key.split(".")]


def train_watched(config: RunConfig, nbytes: int, mutate: Callable[[], None] | None = None) -> tuple[int, int, int]:
    """Two mini-batches: calls into the layer, storages of ``nbytes`` that it made, and calls that left some behind."""
    from optimus_cc.communication.data_parallel import FactoredReduction
    from optimus_cc.communication.embedding import FusedEmbeddingSync
    from optimus_cc.communication.pipeline import CompressedP2PCommunicator
    from optimus_cc.training import loop

    if mutate is not None:
        mutate()
    watch = Watch(nbytes)
    watch.around(CompressedP2PCommunicator, "_communicate", lambda this: _memories(this.state_dict()))
    watch.around(FactoredReduction, "start", lambda this: _memories(this.state_dict()))
    watch.around(FactoredReduction, "finish", lambda this: _memories(this.state_dict()))
    watch.around(FusedEmbeddingSync, "synchronize", lambda this: ())
    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    batches = trainer.batches_for_chunks(random_tokens(config), 0)
    for _ in range(2):
        trainer.train_step(batches)
    return watch.calls, watch.made, len(watch.left)


TECHNIQUES: dict[str, dict[str, Any]] = {
    "cb": low_rank(),
    "no epilogue": low_rank(epilogue_only=False, compress_forward=True),
    "carry": low_rank(epilogue_only=False, residual="carry"),
    "flush": low_rank(epilogue_only=False, residual="flush"),
    "no lazy error": low_rank(epilogue_only=False, lazy_error_propagation=False),
    "top-k": {
        "name": "cb_topk",
        "cb": {"enabled": True, "epilogue_only": False, "codec": {"name": "top_k", "match_rank": 2}},
    },
}


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("pp4", name) for name in TECHNIQUES),
        *(("pp4_v2", name) for name in ("no epilogue", "top-k")),
        *(("tp2_pp2", name) for name in ("carry", "flush")),
    ],
)
def test_no_message_outlives_its_transfer(ranks: RankPool, layout: str, name: str) -> None:
    split = {"split_over_tensor_parallel": True} if layout == "tp2_pp2" else {}
    config = tiny(layout, TECHNIQUES[name], parallel=split)
    nbytes = MESSAGE_BYTES // (2 if split else 1)
    results = ranks.run(config.parallel.world_size, train_watched, config, nbytes)
    assert all(calls > 0 for calls, _, _ in results)
    plain = ranks.run(config.parallel.world_size, train_watched, tiny(layout, parallel=split), nbytes)
    pairs = zip(results, plain, strict=True)
    assert any(made > without for (_, made, _), (_, without, _) in pairs), "the codecs' own tensors were not seen"
    assert [left for _, _, left in results] == [0] * len(results)


def stage_compression(**keys: Any) -> RunConfig:
    codec = {"name": "low_rank", "rank": 1}
    technique = {
        "name": "sc",
        "fe": {"enabled": True},
        "sc": {"enabled": True, "codec": codec, "fraction": 1.0, **keys},
    }
    return tiny("pp4_dp2", technique, model={"hidden_size": WIDE})


@pytest.mark.megatron
@pytest.mark.parametrize("error_feedback", [True, False])
def test_no_gradient_outlives_its_reduction(ranks: RankPool, error_feedback: bool) -> None:
    config = stage_compression(error_feedback=error_feedback)
    results = ranks.run(8, train_watched, config, SMALLEST_MATRIX_BYTES)
    assert all(made > 0 for _, made, _ in results), "the memories themselves, or the stacked gradients, were not seen"
    assert [left for _, _, left in results] == [0] * 8


def keep_what_was_encoded() -> None:
    from optimus_cc.compression.error_feedback import CompressedStream

    original = CompressedStream.remember

    def remember(this: Any) -> None:
        # A copy: what is encoded is the memory itself, or the gradient, and not something of the layer's own.
        kept = this._unremembered and this._unremembered[0].clone()
        original(this)
        this.kept = kept

    setattr(CompressedStream, "remember", remember)  # noqa: B010


def keep_what_was_decoded() -> None:
    from optimus_cc.compression.low_rank import LowRank

    original = LowRank.decode

    def decode(this: Any, payload: Any) -> torch.Tensor:
        this.kept = original(this, payload)
        kept: torch.Tensor = this.kept
        return kept

    setattr(LowRank, "decode", decode)  # noqa: B010


def keep_the_gradients() -> None:
    from optimus_cc.communication import power_sgd

    original = power_sgd.Batch._delta

    def delta(this: Any) -> torch.Tensor:
        this.kept = original(this)
        kept: torch.Tensor = this.kept
        return kept

    setattr(power_sgd.Batch, "_delta", delta)  # noqa: B010


@pytest.mark.parametrize(
    ("config", "nbytes", "mutate"),
    [
        (tiny("pp4", low_rank(epilogue_only=False)), MESSAGE_BYTES, keep_what_was_encoded),
        (tiny("pp4", low_rank(epilogue_only=False)), MESSAGE_BYTES, keep_what_was_decoded),
        (stage_compression(error_feedback=False), SMALLEST_MATRIX_BYTES, keep_the_gradients),
    ],
    ids=["encoded", "decoded", "gradients"],
)
def test_a_layer_that_keeps_something_is_caught(
    ranks: RankPool, config: RunConfig, nbytes: int, mutate: Callable[[], None]
) -> None:
    results = ranks.run(config.parallel.world_size, train_watched, config, nbytes, mutate)
    assert any(left for _, _, left in results)
