"""The schedule of one step as a graph of passes and messages, worked off event by event.

1F1B without chunks posts messages as Megatron-core does: what is sent and received in one call goes together, a message
moves when both ends have posted it, and nobody computes while it moves. The interleaved schedule sends after each
pass; with ``overlap_p2p`` the sender goes on computing. Codecs encode and decode on the rank's own time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from optimus_cc.exposure import Message, Schedule


class Work(NamedTuple):
    """What takes a certain time, wherever it stands in the schedule."""

    kind: str
    """``forward``, ``backward`` (of a virtual stage), ``send_forward``, ``send_backward`` (over a virtual boundary),
    ``encode`` or ``decode``."""
    place: int
    """Virtual stage or boundary."""
    compressed: bool = False


class Node(NamedTuple):
    work: int
    """Index into the graph's :attr:`Graph.works`."""
    rank: int
    """Pipeline rank; of a message, the sender."""
    microbatch: int
    after: tuple[int, ...]
    """Nodes that have to end first."""


Key = tuple[bool, int, int]
"""Of a message: whether it goes backward, its virtual boundary, its micro-batch."""


class Compression(NamedTuple):
    """Which messages go through a codec."""

    forward: bool = False
    backward: bool = False
    epilogue_only: bool = True
    flush: bool = False


UNCOMPRESSED = Compression()


@dataclass(frozen=True)
class Graph:
    works: tuple[Work, ...]
    nodes: tuple[Node, ...]
    """In an order in which each comes after those that it waits for."""
    last: tuple[tuple[int, ...], ...]
    """For each rank the nodes after which it has ended its part."""
    last_backward: dict[int, int]
    """For each virtual stage the node of its last backward pass."""

    def ends(self, seconds: Sequence[float]) -> list[float]:
        """When each node ends, with the seconds that each of :attr:`works` takes."""
        ends: list[float] = []
        add = ends.append
        for work, _, _, after in self.nodes:
            if len(after) == 1:
                start = ends[after[0]]
            else:
                start = 0.0
                for node in after:
                    if ends[node] > start:
                        start = ends[node]
            add(start + seconds[work])
        return ends

    def critical_path(self, ends: Sequence[float], last: int) -> list[int]:
        """The nodes, from the first to ``last``, of which none can be delayed without delaying ``last``."""
        path = [last]
        while after := self.nodes[path[-1]].after:
            path.append(max(after, key=ends.__getitem__))
        return path[::-1]


@lru_cache(maxsize=64)
def graph(schedule: Schedule, compression: Compression = UNCOMPRESSED, *, overlap: bool = False) -> Graph:
    """The graph of ``schedule``. ``overlap``: the interleaved schedule computes while it sends."""
    builder = _Builder(schedule, compression, overlap)
    ranks = range(schedule.pipeline_parallel_size)
    programs = [
        _one_f_one_b(builder, rank) if schedule.num_chunks == 1 else _interleaved(builder, rank) for rank in ranks
    ]
    waiting = list(ranks)
    while waiting:
        # Each program runs until it needs what another one has not posted yet.
        still = [rank for rank in waiting if next(programs[rank], None) is not None]
        if still == waiting and not builder.moved:
            raise AssertionError("the schedule waits for itself")
        waiting, builder.moved = still, False
    last = tuple(builder.at[rank] for rank in ranks)
    return Graph(tuple(builder.works), tuple(builder.nodes), last, builder.last_backward)


@dataclass
class _Builder:
    schedule: Schedule
    compression: Compression
    overlap: bool
    works: dict[Work, int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    at: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For each rank what its next work waits for."""
    posted: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    """What the end of a message that has posted it first waits for."""
    arrived: dict[Key, int] = field(default_factory=dict)
    """The node that is a message's transfer."""
    link: dict[tuple[bool, int], int] = field(default_factory=dict)
    last_backward: dict[int, int] = field(default_factory=dict)
    moved: bool = False

    def __post_init__(self) -> None:
        schedule, flags = self.schedule, self.compression
        self.at = dict.fromkeys(range(schedule.pipeline_parallel_size), ())
        self.compressed: set[Key] = set()
        for rank in range(schedule.pipeline_parallel_size):
            if flags.forward:
                self.compressed |= {_key(False, message) for message in schedule.sent_forward(rank)}
            if flags.backward:
                self.compressed |= {
                    _key(True, message)
                    for message in schedule.sent_backward(rank)
                    if message.is_compressed(epilogue_only=flags.epilogue_only, flush=flags.flush)
                }

    def add(self, work: Work, rank: int, microbatch: int, after: tuple[int, ...]) -> int:
        index = self.works.setdefault(work, len(self.works))
        self.nodes.append(Node(index, rank, microbatch, after))
        self.moved = True
        return len(self.nodes) - 1

    def compute(self, kind: str, rank: int, chunk: int, microbatch: int, after: tuple[int, ...] = ()) -> int:
        stage = chunk * self.schedule.pipeline_parallel_size + rank
        node = self.add(Work(kind, stage), rank, microbatch, self.at[rank] + after)
        self.at[rank] = (node,)
        if kind == "backward":
            self.last_backward[stage] = node
        return node

    def code(self, kind: str, rank: int, key: Key) -> None:
        """Encode or decode a message, if it is compressed."""
        if key in self.compressed:
            self.at[rank] = (self.add(Work(kind, key[1], True), rank, key[2], self.at[rank]),)

    def transfer(self, key: Key, rank: int, after: tuple[int, ...]) -> int:
        backward, boundary, microbatch = key
        work = Work("send_backward" if backward else "send_forward", boundary, key in self.compressed)
        self.arrived[key] = self.add(work, rank, microbatch, tuple(dict.fromkeys(after)))
        return self.arrived[key]

    def exchange(self, rank: int, sends: list[Key], receives: list[Key]) -> Iterator[bool]:
        """Post some messages together, and wait until all of them have moved."""
        for key in sends:
            self.code("encode", rank, key)
        here = self.at[rank]
        for key in (*sends, *receives):
            if key in self.posted:
                backward, boundary, _ = key
                self.transfer(key, boundary + backward, here + self.posted[key])
            else:
                self.posted[key] = here
        while not all(key in self.arrived for key in (*sends, *receives)):
            yield True
        if sends or receives:
            self.at[rank] = tuple(self.arrived[key] for key in (*sends, *receives))
        for key in receives:
            self.code("decode", rank, key)


def _key(backward: bool, message: Message) -> Key:
    return backward, message.boundary, message.microbatch


def _one_f_one_b(builder: _Builder, rank: int) -> Iterator[bool]:
    """Megatron-core's forward_backward_pipelining_without_interleaving, call by call."""
    schedule = builder.schedule
    total, warmup, last = schedule.num_microbatches, schedule.warmup_steps(rank), schedule.pipeline_parallel_size - 1

    def forward_in(i: int) -> list[Key]:
        return [(False, rank - 1, i)] if rank > 0 and i < total else []

    def forward_out(i: int) -> list[Key]:
        return [(False, rank, i)] if rank < last else []

    def backward_in(i: int) -> list[Key]:
        return [(True, rank, i)] if rank < last else []

    def backward_out(i: int) -> list[Key]:
        return [(True, rank - 1, i)] if rank > 0 else []

    for i in range(warmup):
        yield from builder.exchange(rank, [], forward_in(i))
        builder.compute("forward", rank, 0, i)
        yield from builder.exchange(rank, forward_out(i), [])
    steady = total - warmup
    if steady:
        yield from builder.exchange(rank, [], forward_in(warmup))
    for i in range(steady):
        builder.compute("forward", rank, 0, warmup + i)
        yield from builder.exchange(rank, forward_out(warmup + i), backward_in(i))
        builder.compute("backward", rank, 0, i)
        more = i < steady - 1
        yield from builder.exchange(rank, backward_out(i), forward_in(warmup + i + 1) if more else [])
    for i in range(steady, total):
        yield from builder.exchange(rank, [], backward_in(i))
        builder.compute("backward", rank, 0, i)
        yield from builder.exchange(rank, backward_out(i), [])


def _interleaved(builder: _Builder, rank: int) -> Iterator[bool]:
    """Megatron-core's forward_backward_pipelining_with_interleaving: its order of passes, a message after each."""
    schedule = builder.schedule
    size, stages = schedule.pipeline_parallel_size, schedule.pipeline_parallel_size * schedule.num_chunks
    warmup, total = schedule.warmup_steps(rank), schedule.num_steps
    forwards = [("forward", *step) for step in schedule.forward_order]
    backwards = [("backward", *step) for step in schedule.backward_order]
    order = forwards[:warmup]
    for pair in zip(forwards[warmup:], backwards[: total - warmup], strict=True):
        order += pair
    for kind, chunk, microbatch in order + backwards[total - warmup :]:
        stage, backward = chunk * size + rank, kind == "backward"
        arriving = (backward, stage if backward else stage - 1, microbatch)
        after: tuple[int, ...] = ()
        if 0 <= arriving[1] < stages - 1:
            while arriving not in builder.arrived:
                yield True
            after = (builder.arrived[arriving],)
            if arriving in builder.compressed:
                builder.at[rank] = tuple(dict.fromkeys(builder.at[rank] + after))
                builder.code("decode", rank, arriving)
                after = ()
        builder.compute(kind, rank, chunk, microbatch, after)
        leaving = (backward, stage - 1 if backward else stage, microbatch)
        if not 0 <= leaving[1] < stages - 1:
            continue
        builder.code("encode", rank, leaving)
        before, link = builder.at[rank], leaving[:2]
        if builder.overlap:  # on a stream of its own, in order
            before += (builder.link[link],) if link in builder.link else ()
        builder.link[link] = builder.transfer(leaving, rank, before)
        if not builder.overlap:
            builder.at[rank] = (builder.link[link],)
