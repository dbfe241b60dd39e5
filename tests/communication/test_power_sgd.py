"""PowerSGD over ranks that are threads of this process: bounded memories, nothing lost, whatever travels."""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimus_cc.communication import factor_mean
from optimus_cc.communication.power_sgd import Batch, PowerSgd
from optimus_cc.config.codec import LowRankConfig

SIZE = 4
WIRES = ("fp32", "bf16", "fp16")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
State = dict[str, torch.Tensor]
Matrices = dict[str, torch.Tensor]


class Ranks:
    """Threads that take each other for ranks, one of which runs at a time: until it waits for what others send."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns: list[threading.Semaphore] = []
        self._sent: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        """By number of the collective and rank."""
        self._failed = False

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            self._turns[rank].acquire()
            try:
                return function(SimpleNamespace(size=lambda: self.size, rank=lambda: rank, number=itertools.count()))
            except BaseException:
                self._failed = True
                raise
            finally:
                self._turns[(rank + 1) % self.size].release()

        self._sent.clear()
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        with ThreadPoolExecutor(self.size) as pool:
            results = [pool.submit(one, rank) for rank in range(self.size)]
            self._turns[0].release()
        return [result.result() for result in results]

    def _post(
        self, group: Any, given: torch.Tensor, into: torch.Tensor, make: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> Any:
        number, rank = next(group.number), group.rank()
        self._sent[number][rank] = given.clone()
        self._sent.pop(number - 2, None)

        def wait() -> None:
            while len(self._sent[number]) < self.size:
                self._turns[(rank + 1) % self.size].release()
                self._turns[rank].acquire()
                assert not self._failed, "another rank failed"
            into.copy_(make([self._sent[number][each] for each in range(self.size)]))

        return SimpleNamespace(wait=wait)

    def all_reduce(self, tensor: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        return self._post(group, tensor, tensor, lambda sent: torch.stack(sent).sum(0))

    def all_to_all_single(self, into: torch.Tensor, given: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        assert given.dtype == into.dtype != torch.float32
        return self._post(group, given, into, lambda sent: torch.stack([each[group.rank()] for each in sent]))

    def all_gather_into_tensor(self, into: torch.Tensor, given: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        assert given.dtype == into.dtype != torch.float32
        return self._post(group, given, into, torch.cat)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks(SIZE)
    monkeypatch.setattr(factor_mean, "dist", ranks)
    return ranks


def reduced(
    group: Any,
    steps: int,
    gradients: Callable[[int, int], Matrices],
    *,
    rank: int = 4,
    wire: str = "fp32",
    scale: float = 1.0,
    state: State | None = None,
) -> Iterator[tuple[Matrices, Matrices, State]]:
    """What goes in, what comes out and what is kept, of each step of one rank."""
    buffers = {name: value.clone() for name, value in gradients(0, group.rank()).items()}
    codec = LowRankConfig(rank=rank, wire_dtype=wire)  # type: ignore[arg-type]
    factors = PowerSgd(group, buffers, dict.fromkeys(buffers, scale), codec, feedback=True, seed=0)
    if state is not None:
        factors.load_state_dict(state)
    for step in range(steps):
        given = gradients(step, group.rank())
        for name, value in given.items():
            buffers[name].copy_(value)
        factors.start(step)
        factors.finish()
        state = {name: value.clone() for name, value in factors.state_dict().items()}
        yield given, {name: value.clone() for name, value in buffers.items()}, state


def random(step: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1 + 10**4 * rank + step))


SIGNAL = random(-1, 0, 24, 4) @ random(-1, 1, 4, 32) / 2


def noisy(dtype: torch.dtype = torch.float32) -> Callable[[int, int], Matrices]:
    """A constant signal of rank 4 on all ranks, and noise of their own."""
    return lambda step, rank: {"w": (SIGNAL + 2 * random(step, rank, 24, 32)).to(dtype)}


def memories_over_gradients(results: list[list[tuple[Matrices, Matrices, State]]], step: int) -> float:
    memory = sum(float(rank[step][2]["memory.w"].norm()) for rank in results)
    return memory / sum(float(rank[step][0]["w"].float().norm()) for rank in results)


def test_memories_do_not_grow() -> None:
    """With the averaged factor in place of a rank's own they grow with the square root of the step, to 26 here."""
    views = [torch.zeros(24, 32) for _ in range(SIZE)]
    batches = [Batch({"w": view}, 1.0, LowRankConfig(rank=4), feedback=True, seed=0) for view in views]
    sizes = []
    for step in range(1000):
        for view, noise in zip(views, random(step, 0, SIZE, 24, 32), strict=True):
            torch.add(SIGNAL, noise, alpha=2, out=view)
        size = float(views[0].norm())
        left = torch.stack([batch.project(step) for batch in batches]).mean(0)
        shares = [batch.second(left) for batch in batches]
        right = torch.stack(shares).mean(0)
        for batch, share in zip(batches, shares, strict=True):
            batch.apply(right, share)
        sizes.append(float(batches[0].state_dict()["memory.w"].norm()) / size)
    assert sizes[0] < 1
    assert 1.5 < max(sizes) < 3
    assert sizes[-1] < 1.3 * sizes[50]


@pytest.mark.parametrize(("wire", "dtype", "scale"), [*itertools.product(WIRES, DTYPES, [1.0]), ("fp16", "bf16", 4.0)])
def test_all_that_came_out_and_the_mean_memory_are_the_mean_of_all_gradients(
    threads: Ranks, wire: str, dtype: str, scale: float
) -> None:
    steps = 25
    results = threads.run(lambda group: list(reduced(group, steps, noisy(DTYPES[dtype]), wire=wire, scale=scale)))
    out = torch.zeros(24, 32, dtype=torch.float64)
    given = torch.zeros_like(out)
    for step in range(steps):
        everyones = [rank[step] for rank in results]
        given += torch.stack([each[0]["w"].double() for each in everyones]).mean(0)
        assert all(torch.equal(each[1]["w"], everyones[0][1]["w"]) for each in everyones)
        assert all(torch.equal(each[2]["query.w"], everyones[0][2]["query.w"]) for each in everyones)
        out += everyones[0][1]["w"].double() / scale
        kept = torch.stack([each[2]["memory.w"].double() for each in everyones]).mean(0)
        assert float((out + kept - given).norm() / SIGNAL.norm()) < 2e-6
    assert memories_over_gradients(results, steps - 1) < 3  # 4 where they grow


@pytest.mark.parametrize("wire", WIRES)
def test_small_and_large_gradients_of_one_bucket_arrive(threads: Ranks, wire: str) -> None:
    """At the signal's rank only what the rounded first factor misses is left out. One rank has nothing to say."""
    magnitudes = [1e-30, 5e-10, 5e-8, 1.0, 1e4, 1e20]

    def gradients(step: int, rank: int) -> Matrices:
        matrices = {f"w{i}": value * (SIGNAL + SIGNAL * random(0, rank, 1)) for i, value in enumerate(magnitudes)}
        return {name: value if rank else torch.zeros_like(value) for name, value in matrices.items()}

    results = threads.run(lambda group: list(reduced(group, 2, gradients, wire=wire)))
    for index, magnitude in enumerate(magnitudes):
        for step in range(2):
            given = torch.stack([rank[step][0][f"w{index}"].double() for rank in results]).mean(0)
            error = results[0][step][1][f"w{index}"].double() - given
            assert float(error.norm() / given.norm()) < {"fp32": 1e-5, "bf16": 0.1, "fp16": 0.02}[wire], magnitude


@pytest.mark.parametrize("bad", [math.nan, math.inf, 6e4])
@pytest.mark.parametrize(("wire", "dtype"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp16")])
def test_what_is_not_finite_on_one_rank_comes_out_on_all_and_is_not_kept(
    threads: Ranks, wire: str, dtype: str, bad: float
) -> None:
    """6e4 is finite; with what is in memory it is not in fp16."""

    def gradients(step: int, rank: int) -> Matrices:
        both = {name: (SIGNAL + random(step, rank, 24, 32)).to(DTYPES[dtype]) for name in ("spoilt", "other")}
        if bad == 6e4:
            both["spoilt"].fill_(bad)
        elif rank == 2 and step == 2:
            both["spoilt"][step + 3, 5] = bad
        return both

    results = threads.run(lambda group: list(reduced(group, 4, gradients, wire=wire, scale=4.0)))
    for rank in results:
        if bad != 6e4:
            assert not torch.isfinite(rank[2][1]["spoilt"]).any()
            assert not rank[2][2]["memory.spoilt"].any()
        elif dtype == "fp16":
            assert not torch.isfinite(rank[2][1]["spoilt"]).any()
        for _, out, state in (rank[1], rank[3], *([rank[2]] if bad == 6e4 else [])):
            assert torch.isfinite(out["other"]).all()
            assert bad == 6e4 or torch.isfinite(out["spoilt"]).all()
            assert all(torch.isfinite(value).all() for value in state.values())
        assert all(torch.isfinite(value).all() for value in rank[2][2].values())


def test_memories_of_a_checkpoint_that_differ_from_their_mean_lose_the_difference_and_nothing_else(
    threads: Ranks,
) -> None:
    """As those of the averaged rule do."""
    steps, size = 60, 16 * float(noisy()(0, 0)["w"].norm())

    def saved(group: Any, deviation: float) -> State:
        apart = torch.stack([random(7, rank, 24, 32) for rank in range(SIZE)])
        apart = apart - apart.mean(0)
        *_, (_, _, state) = reduced(group, 5, noisy())
        return {**state, "memory.w": state["memory.w"] + deviation * apart[group.rank()] / apart[0].norm()}

    def go_on(group: Any, deviation: float) -> list[tuple[Matrices, Matrices, State]]:
        state = saved(group, deviation)
        return list(reduced(group, steps, lambda step, rank: noisy()(step + 5, rank), state=state))

    without = threads.run(lambda group: go_on(group, 0.0))
    with_it = threads.run(lambda group: go_on(group, size))
    assert memories_over_gradients(with_it, 0) > 10
    assert memories_over_gradients(with_it, steps - 1) < 3
    for a, b in zip(without[0][:20], with_it[0][:20], strict=True):
        assert float((a[1]["w"] - b[1]["w"]).norm() / a[1]["w"].norm()) < 1e-3
