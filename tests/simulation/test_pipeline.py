"""The schedule as a graph: small ones by hand, all of them against closed forms and against exposure.py."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_cc.exposure import Schedule
from optimus_cc.simulation.pipeline import Compression, Graph, graph


def seconds(of: Graph, forward: float, backward: float, message: float = 0.0, codec: float = 0.0) -> list[float]:
    times = {"forward": forward, "backward": backward, "encode": codec, "decode": codec}
    return [times.get(work.kind, message) for work in of.works]


def length(of: Graph, *times: float) -> float:
    return max(of.ends(seconds(of, *times)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    if chunks == 1 or stages == 1:
        return Schedule(stages, 1, draw(st.integers(1, 14)))
    return Schedule(stages, chunks, stages * draw(st.integers(1, 4)))


@settings(max_examples=60, deadline=None)
@given(schedules(), st.floats(0.1, 9), st.floats(0.1, 9))
def test_the_bubble_has_its_closed_form(schedule: Schedule, forward: float, backward: float) -> None:
    """Passes of equal length and messages that take no time: (P - 1) / (M v) of the passes' own time is waited for."""
    size, work = schedule.pipeline_parallel_size, schedule.num_steps * (forward + backward)
    assert length(graph(schedule), forward, backward) == pytest.approx(work * (1 + (size - 1) / schedule.num_steps))


@pytest.mark.parametrize(
    ("stages", "microbatches", "expected"),
    [
        (1, 3, 3 * (1 + 2)),
        # F, send 10, F, B, send 10, B: all one after the other.
        (2, 1, 1 + 10 + 1 + 2 + 10 + 2),
        # Stage 1: F0 at 11, B0 to 14; its gradient passes F1's activation, to 24; F1, B1 to 27; back to 37; B1.
        (2, 2, 11 + 3 + 10 + 3 + 10 + 2),
        (3, 1, 3 * 1 + 2 * 10 + 3 * 2 + 2 * 10),
    ],
)
def test_by_hand(stages: int, microbatches: int, expected: float) -> None:
    assert length(graph(Schedule(stages, 1, microbatches)), 1, 2, 10) == expected


def test_messages_overlap_only_where_they_are_told_to() -> None:
    schedule = Schedule(4, 2, 8)
    waiting, overlapped = graph(schedule), graph(schedule, overlap=True)
    assert length(overlapped, 1, 2, 0.5) < length(waiting, 1, 2, 0.5)
    assert length(overlapped, 1, 2, 0) == length(waiting, 1, 2, 0)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.booleans(), st.booleans(), st.booleans())
def test_messages_are_those_of_the_schedule(
    schedule: Schedule, epilogue_only: bool, flush: bool, forward: bool
) -> None:
    """Each is sent once, by its sender, and compressed where exposure.py says so; codecs run at both of its ends."""
    found = graph(schedule, Compression(forward, True, epilogue_only, flush))
    sent: Counter[tuple[str, int, int, int, bool]] = Counter()
    coded: Counter[str] = Counter()
    for node in found.nodes:
        work = found.works[node.work]
        if work.kind.startswith("send"):
            sent[work.kind, work.place, node.microbatch, node.rank, work.compressed] += 1
        elif work.kind in ("encode", "decode"):
            coded[work.kind] += 1
    expected: Counter[tuple[str, int, int, int, bool]] = Counter()
    for rank in range(schedule.pipeline_parallel_size):
        for message in schedule.sent_forward(rank):
            expected["send_forward", message.boundary, message.microbatch, rank, forward] += 1
        for message in schedule.sent_backward(rank):
            compressed = message.is_compressed(epilogue_only=epilogue_only, flush=flush)
            expected["send_backward", message.boundary, message.microbatch, rank, compressed] += 1
    assert sent == expected
    assert coded["encode"] == coded["decode"] == sum(count for key, count in sent.items() if key[-1])


@settings(max_examples=40, deadline=None)
@given(schedules(), st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 5), st.booleans())
def test_nobody_does_two_things_at_once(
    schedule: Schedule, forward: float, backward: float, message: float, overlap: bool
) -> None:
    found = graph(schedule, Compression(backward=True), overlap=overlap)
    taken = seconds(found, forward, backward, message, 0.3)
    ends = found.ends(taken)
    for rank in range(schedule.pipeline_parallel_size):
        own = [
            (end - taken[node.work], end)
            for node, end in zip(found.nodes, ends, strict=True)
            if node.rank == rank and not found.works[node.work].kind.startswith("send")
        ]
        own.sort()
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in itertools.pairwise(own))


def test_the_critical_path_is_gapless() -> None:
    found = graph(Schedule(4, 1, 8))
    taken = seconds(found, 1.0, 2.0, 0.25)
    ends = found.ends(taken)
    last = max(range(len(ends)), key=ends.__getitem__)
    assert sum(taken[found.nodes[node].work] for node in found.critical_path(ends, last)) == pytest.approx(ends[last])
