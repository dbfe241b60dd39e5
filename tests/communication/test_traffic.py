"""The meter against the operating system's counters, and against the arithmetic of ring collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc.communication.traffic import TRAFFIC_CLASSES, TrafficMeter
from optimus_cc.config import RunConfig
from tests.configurations import VOCABULARY, low_rank, tiny
from tests.ranks import RankPool
from tests.training_runs import backend_in_world, random_tokens


def _bytes_written_by_this_process() -> int:
    """What the kernel saw this process write, sockets included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def _declared_and_written(config: RunConfig, steps: int) -> tuple[dict[str, float], int]:
    from optimus_cc.training import loop

    trainer = loop.Trainer.build(config, backend_in_world(config), VOCABULARY)
    batches = trainer.batches_for_chunks(random_tokens(config), 0)
    trainer.train_step(batches)  # opens connections
    trainer.any_rank(False)
    trainer.attachment.traffic()
    before = _bytes_written_by_this_process()
    for _ in range(steps):
        trainer.train_step(batches)
    trainer.any_rank(False)
    written = _bytes_written_by_this_process() - before
    return {name: count.wire_bytes for name, count in trainer.attachment.traffic().items()}, written


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's per-process write counter")
@pytest.mark.parametrize("technique", ["baseline", "cb"])
@pytest.mark.parametrize("layout", ["pp4", "tp2_pp2_dp2", "pp2_v2_overlap"])
def test_every_byte_that_the_kernel_saw_is_counted(ranks: RankPool, layout: str, technique: str) -> None:
    # Large messages, so that gloo's headers are small beside them.
    config = tiny(
        layout, low_rank(epilogue_only=False) if technique == "cb" else None, micro_batch_size=16, num_microbatches=4
    )
    results = ranks.run(config.parallel.world_size, _declared_and_written, config, 3)
    declared = sum(sum(counts.values()) for counts, _ in results)
    written = sum(total for _, total in results)
    # Gloo adds a header to each message and pads small collectives; it sends nothing twice.
    assert declared <= written <= 1.06 * declared


def _collectives() -> list[tuple[str, float, float]]:
    """Each collective's count, and what the ring algorithm makes a rank send."""
    size = dist.get_world_size()
    groups = {name: dist.new_group() for name in ("tensor_parallel", "data_parallel", "unnamed")}
    meter = TrafficMeter({groups[name].group_name: name for name in ("tensor_parallel", "data_parallel")})
    meter.observe()
    results = []

    def count(label: str, name: str, expected: float, call: Any) -> None:
        meter.take()
        call()
        counts = meter.take()
        others = [other for other in TRAFFIC_CLASSES if other != name and counts[other].wire_bytes]
        assert not others, (label, others)
        assert counts[name].wire_bytes == counts[name].logical_bytes
        results.append((label, counts[name].wire_bytes, expected))

    small, large = torch.ones(6 * size), torch.ones(6 * size * size)
    share = (size - 1) / size
    tp, dp = groups["tensor_parallel"], groups["data_parallel"]
    count("all_reduce", "tensor_parallel", 2 * share * small.nbytes, lambda: dist.all_reduce(small, group=tp))
    count("all_reduce", "data_parallel", 2 * share * small.nbytes, lambda: dist.all_reduce(small, group=dp))
    count("elsewhere", "other", 2 * share * small.nbytes, lambda: dist.all_reduce(small, group=groups["unnamed"]))
    count("world", "other", 2 * share * small.nbytes, lambda: dist.all_reduce(small))
    count("broadcast", "tensor_parallel", share * small.nbytes, lambda: dist.broadcast(small, 0, group=tp))
    count(
        "all_gather_into_tensor",
        "parameter_gather",
        share * large.nbytes,
        lambda: dist.all_gather_into_tensor(large, small, group=dp),
    )
    count(
        "all_gather_into_tensor",
        "tensor_parallel",
        share * large.nbytes,
        lambda: dist.all_gather_into_tensor(large, small, group=tp),
    )
    count(
        "all_gather",
        "tensor_parallel",
        share * large.nbytes,
        lambda: dist.all_gather([torch.empty_like(small) for _ in range(size)], small, group=tp),
    )
    count(
        "reduce_scatter_tensor",
        "data_parallel",
        share * large.nbytes,
        lambda: dist.reduce_scatter_tensor(small, large, group=dp),
    )

    def coalesced(call: Any) -> Any:
        def run() -> None:
            with dist.distributed_c10d._coalescing_manager(dp, async_ops=True) as work:
                call()
            work.wait()

        return run

    count(
        "coalesced all_reduce",
        "data_parallel",
        4 * share * small.nbytes,
        coalesced(lambda: (dist.all_reduce(small, group=dp), dist.all_reduce(small.clone(), group=dp))),
    )
    with meter.scope("other"):
        count("in scope", "other", 2 * share * small.nbytes, lambda: dist.all_reduce(small, group=tp))
        count(
            "out of scope's reach", "data_parallel", 2 * share * small.nbytes, lambda: dist.all_reduce(small, group=dp)
        )
    meter.take()
    with meter.in_place_of("data_parallel", 1000.0):
        dist.all_reduce(small, group=dp)
        dist.all_reduce(small, group=tp)
    taken = meter.take()
    sent = 2 * share * small.nbytes
    assert (taken["data_parallel"].logical_bytes, taken["data_parallel"].wire_bytes) == (1000.0, sent)
    assert (taken["tensor_parallel"].logical_bytes, taken["tensor_parallel"].wire_bytes) == (sent, sent)
    count("barrier", "other", 0.0, lambda: dist.barrier(group=tp))
    meter.stop()
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_count_the_rings_bytes(ranks: RankPool, size: int) -> None:
    for results in ranks.run(size, _collectives):
        assert len(results) == 13
        for label, counted, expected in results:
            assert counted == pytest.approx(expected, rel=1e-12), label


def _observe_twice_and_stop() -> bool:
    before = dict(vars(dist.ProcessGroup))
    first, second = TrafficMeter({}), TrafficMeter({})
    first.observe()
    second.observe()
    dist.all_reduce(torch.ones(4))
    assert first.take()["other"].wire_bytes == second.take()["other"].wire_bytes == 16
    first.stop()
    dist.all_reduce(torch.ones(4))
    assert not first.take()["other"].wire_bytes
    assert second.take()["other"].wire_bytes
    if dist.get_rank() == 0:  # somebody else's message is no stage-to-stage message
        dist.send(torch.ones(5), 1)
    else:
        dist.recv(torch.empty(5), 0)
    second.check()
    assert second.take()["other"].wire_bytes == (20 if dist.get_rank() == 0 else 0)
    second.stop()
    dist.all_reduce(torch.ones(4))
    assert not second.take()["other"].wire_bytes
    return all(vars(dist.ProcessGroup).get(name) is value for name, value in before.items())


def test_stopping_leaves_torch_as_it_was(ranks: RankPool) -> None:
    assert ranks.run(2, _observe_twice_and_stop) == [True, True]


def test_a_pipeline_that_declares_other_bytes_than_it_sends_is_an_error() -> None:
    meter = TrafficMeter({})
    meter.add("pipeline_backward", 100, 10)
    with pytest.raises(RuntimeError, match="declared 10 wire bytes but 0 were sent"):
        meter.check()
    with pytest.raises(ValueError, match="unknown traffic classes"):
        TrafficMeter({"0": "gossip"})
