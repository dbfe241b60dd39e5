"""exposure.py against the calls that Megatron-core's schedules really make."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from optimus_cc.exposure import Message, Schedule
from tests.ranks import RankPool

ONE_F_ONE_B = [(size, 1, microbatches, False) for size in range(2, 9) for microbatches in range(1, 33)]
INTERLEAVED = [
    (size, chunks, microbatches, overlap)
    for size in range(2, 9)
    for chunks in range(2, 5)
    for microbatches in range(size, 33, size)
    for overlap in (False, True)
    if size > 2 or overlap  # two stages with chunks are only right with overlapped messages
]


def disagreements(
    case: tuple[int, int, int, bool], schedule_type: Callable[..., Schedule] = Schedule, group_size: int | None = None
) -> list[str]:
    """Where the map and what happened differ, over all ranks of one combination."""
    from tests.schedules import megatron_warmup, run_schedule

    size, chunks, microbatches, overlap = case
    schedule = schedule_type(
        pipeline_parallel_size=size, num_chunks=chunks, num_microbatches=microbatches, microbatch_group_size=group_size
    )
    found = []
    for rank in range(size):
        log = run_schedule(size, chunks, microbatches, rank, overlap=overlap, group_size=group_size)
        sent = [(message.boundary, message.microbatch) for message in schedule.sent_backward(rank)]
        if sent != [(chunk * size + rank - 1, microbatch) for chunk, microbatch in log.sent_backward]:
            found.append(f"rank {rank} sends other gradients")
        sent = [(message.boundary, message.microbatch) for message in schedule.sent_forward(rank)]
        if sent != [(chunk * size + rank, microbatch) for chunk, microbatch in log.sent_forward]:
            found.append(f"rank {rank} sends other activations")
        arriving = schedule.received_backward(rank)
        if len(arriving) != len(log.consumed_backward):
            found.append(f"rank {rank} receives {len(log.consumed_backward)} gradients, not {len(arriving)}")
            continue
        for number, message in enumerate(arriving):
            place = (message.boundary // size, message.microbatch)
            if log.consumed_backward[number] != place:
                found.append(f"rank {rank}: gradient {number} is for {log.consumed_backward[number]}, not {place}")
            if chunks == 1:
                in_cooldown = number in log.received_in_cooldown
            else:
                # The cool-down is as long as the warm-up, by Megatron-core's own count.
                cooldown = megatron_warmup(size, chunks, microbatches, rank, group_size or size)
                step = log.backward_steps.index(log.consumed_backward[number])
                in_cooldown = step >= len(log.backward_steps) - cooldown
            if in_cooldown != message.epilogue:
                found.append(f"rank {rank}: gradient {number} is wrongly placed in or out of the epilogue")
        for number, message in enumerate(schedule.received_forward(rank)):
            if log.consumed_forward[number] != ((message.boundary + 1) // size, message.microbatch):
                found.append(f"rank {rank}: activation {number} is another one")
    return found


def check_share(cases: list[tuple[int, int, int, bool]]) -> tuple[int, dict[tuple[int, int, int, bool], list[str]]]:
    """This rank's share of the combinations: how many, and those in which something differs."""
    share = cases[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    found = {case: disagreements(case) for case in share}
    return len(share), {case: lines for case, lines in found.items() if lines}


@pytest.mark.megatron
def test_map_equals_the_schedules_calls(ranks: RankPool) -> None:
    """Every combination that Megatron-core accepts by default up to 8 stages, 4 chunks, 32 micro-batches."""
    cases = ONE_F_ONE_B + INTERLEAVED
    results = ranks.run(2, check_share, cases)
    assert sum(count for count, _ in results) == len(cases) == 224 + 270
    assert [wrong for _, wrong in results if wrong] == []


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("case", "group_size"),
    [
        ((4, 2, 16, False), 8),
        ((4, 3, 12, True), 6),
        ((2, 2, 9, True), 3),
        ((4, 2, 14, False), 5),
    ],
)
def test_map_knows_other_group_sizes(ranks: RankPool, case: tuple[int, int, int, bool], group_size: int) -> None:
    """microbatch_group_size_per_vp_stage between the pipeline's size and the number of micro-batches."""
    assert ranks.run(1, disagreements, case, Schedule, group_size) == [[]]
    assert ranks.run(1, disagreements, case, _PipelineSizedGroups, group_size) != [[]]


class _PipelineSizedGroups(Schedule):
    @property
    def group_size(self) -> int:
        return self.pipeline_parallel_size


class _EpilogueByTheSendersPhase(Schedule):
    """The published artifact's rule: the sender's own cool-down decides."""

    def sent_backward(self, rank: int) -> tuple[Message, ...]:
        start = self.num_steps - self.warmup_steps(rank)
        order = [place for place in self.backward_order if place[0] * self.pipeline_parallel_size + rank > 0]
        return tuple(
            replace(message, epilogue=self.backward_order.index(place) >= start)
            for place, message in zip(order, super().sent_backward(rank), strict=True)
        )


class _OneWarmUpStepMore(Schedule):
    def warmup_steps(self, rank: int) -> int:
        return min(super().warmup_steps(rank) + 1, self.num_steps)


class _ChunksInForwardOrder(Schedule):
    @property
    def backward_order(self) -> tuple[tuple[int, int], ...]:
        return self.forward_order


@pytest.mark.megatron
@pytest.mark.parametrize("mutant", [_EpilogueByTheSendersPhase, _OneWarmUpStepMore, _ChunksInForwardOrder])
def test_a_wrong_map_is_found(ranks: RankPool, mutant: type[Schedule]) -> None:
    assert ranks.run(1, disagreements, (4, 2, 16, False), mutant)[0]


@pytest.mark.parametrize("microbatches", [1, 3, 4, 16])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_epilogue_of_1f1b_is_the_last_messages_of_each_stage(size: int, microbatches: int) -> None:
    """Stage p sends min(P - p, M) messages that nothing hides (Optimus-CC, section 5.2)."""
    schedule = Schedule(size, 1, microbatches)
    for stage in range(1, size):
        flags = [message.epilogue for message in schedule.sent_backward(stage)]
        exposed = min(size - stage, microbatches)
        assert flags == [False] * (microbatches - exposed) + [True] * exposed
    assert schedule.sent_backward(0) == ()


def test_paper_layout_compresses_six_of_forty_eight() -> None:
    counts = Schedule(4, 1, 16).compressed_counts(epilogue_only=True, flush=False)
    assert counts == {0: 3, 1: 2, 2: 1}
    assert sum(Schedule(4, 1, 16).compressed_counts(epilogue_only=False, flush=False).values()) == 48
    assert sum(Schedule(4, 1, 16).compressed_counts(epilogue_only=False, flush=True).values()) == 45
    assert Schedule(4, 1, 16).compressed_counts(epilogue_only=True, flush=True) == {0: 2, 1: 1, 2: 0}


def test_one_stage_sends_nothing() -> None:
    assert Schedule(1, 1, 8).compressed_counts(epilogue_only=False, flush=False) == {}


def last_backward_ends(schedule: Schedule, forward_cost: int, backward_cost: int) -> list[int]:
    """When each rank's last backward step ends if messages take no time and every step starts as soon as it can."""
    size, chunks = schedule.pipeline_parallel_size, schedule.num_chunks
    waiting = []
    for rank in range(size):
        forward = [("forward", chunk * size + rank, microbatch) for chunk, microbatch in schedule.forward_order]
        backward = [("backward", chunk * size + rank, microbatch) for chunk, microbatch in schedule.backward_order]
        warmup = schedule.warmup_steps(rank)
        steady = [step for pair in zip(forward[warmup:], backward, strict=False) for step in pair]
        waiting.append([*forward[:warmup], *steady, *backward[len(forward) - warmup :]])
    ended: dict[tuple[str, int, int], int] = {}
    clock = [0] * size
    while any(waiting):
        progress = False
        for rank, steps in enumerate(waiting):
            while steps:
                direction, stage, microbatch = step = steps[0]
                before = (direction, stage + (-1 if direction == "forward" else 1), microbatch)
                if before not in ended and 0 <= before[1] < size * chunks:
                    break
                cost = forward_cost if direction == "forward" else backward_cost
                clock[rank] = ended[step] = max(clock[rank], ended.get(before, 0)) + cost
                steps.pop(0)
                progress = True
        assert progress, "the schedule waits for itself"
    return clock


@pytest.mark.parametrize("costs", [(1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize(("size", "chunks"), [(1, 1), *product([2, 4, 7], [1, 2, 3])])
def test_steps_that_are_left_after_a_ranks_last_backward(size: int, chunks: int, costs: tuple[int, int]) -> None:
    for microbatches in (size, 4 * size):
        schedule = Schedule(pipeline_parallel_size=size, num_chunks=chunks, num_microbatches=microbatches)
        ends = last_backward_ends(schedule, *costs)
        left = [schedule.backward_steps_left(rank) * costs[1] for rank in range(size)]
        assert [ends[0] - end for end in ends] == left
