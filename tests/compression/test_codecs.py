"""Codecs against what they declare, and against float64 linear algebra."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from optimus_cc.compression import (
    Codec,
    CompressedStream,
    Identity,
    LowRank,
    Part,
    TopK,
    WireFormat,
    build_codec,
)
from optimus_cc.config.codec import CodecConfig
from optimus_cc.wire_size import BLOCK_ENTRIES, top_k_blocks, wire_nbytes

SHAPES = [(0, 8), (4, 0), (1,), (1, 1), (7,), (5, 3), (16, 2, 24), (3, 1, 1), (33, 65), (2, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODECS: dict[str, Codec] = {
    "identity": Identity(),
    "rank 1": LowRank(1),
    "rank 4": LowRank(4),
    "rank 4 cold": LowRank(4, warm_start=False),
    "rank 4 on bf16 wire": LowRank(4, wire_dtype="bf16"),
    "rank 4 on fp32 wire": LowRank(4, wire_dtype="fp32"),
    "rank 1000": LowRank(1000),
    "top-k": TopK(density=0.1),
    "top-k of rank 4's size": TopK(match_rank=4),
    "top-k on bf16 wire": TopK(density=0.1, wire_dtype="bf16"),
    "top-k of all": TopK(density=1.0),
}
STATELESS = ("identity", "top-k")


def _random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _best_rank_k_error(matrix: torch.Tensor, rank: int) -> float:
    singular = torch.linalg.svdvals(matrix.double())
    return float(singular[rank:].square().sum().sqrt())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_payload_is_what_the_wire_format_declares(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec = CODECS[name]
    wire = codec.wire_format(shape, dtype)
    payload = codec.encode(_random(shape, dtype), codec.new_state(("test",)))
    assert payload.wire == wire
    assert payload.data.dim() == 1
    assert payload.data.is_contiguous()
    assert payload.data.numel() * payload.data.element_size() == wire.nbytes
    assert wire.nbytes == sum(math.prod(part.shape) * part.dtype.itemsize for part in wire.parts)
    assert wire.logical_nbytes == math.prod(shape) * dtype.itemsize
    received = wire.allocate(torch.device("cpu"))
    received.copy_(payload.data)
    decoded = codec.decode(type(payload)(wire, received))
    assert decoded.shape == torch.Size(shape)
    assert decoded.dtype == dtype


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (8, 2, 12), (1, 5), (5, 1), (1, 1), (7,)], ids=str)
@pytest.mark.parametrize("warm_start", [True, False])
def test_full_rank_is_exact_to_rounding(shape: tuple[int, ...], warm_start: bool) -> None:
    codec = LowRank(1000, warm_start=warm_start)
    state = codec.new_state(("test",))
    for seed in range(3):
        tensor = _random(shape, seed=seed)
        torch.testing.assert_close(codec.decode(codec.encode(tensor, state)), tensor, rtol=1e-4, atol=1e-5)


def test_full_rank_is_exact_for_a_matrix_of_fast_decaying_spectrum() -> None:
    left, _ = torch.linalg.qr(_random((40, 20), torch.float32, 1).double())
    right, _ = torch.linalg.qr(_random((20, 20), torch.float32, 2).double())
    matrix = ((left * torch.logspace(0, -12, 20).double()) @ right.t()).float()
    codec = LowRank(20)
    state = codec.new_state(("test",))
    for _ in range(3):
        torch.testing.assert_close(codec.decode(codec.encode(matrix, state)), matrix, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_warm_start_converges_to_the_best_approximation(rank: int) -> None:
    matrix = _random((60, 40)) * torch.logspace(0, -3, 40)
    codec = LowRank(rank)
    state = codec.new_state(("test",))
    best = _best_rank_k_error(matrix, rank)
    errors = []
    for _ in range(60):
        approximation = codec.decode(codec.encode(matrix, state)).double()
        assert torch.linalg.matrix_rank(approximation, rtol=1e-5) <= rank
        errors.append(float((matrix.double() - approximation).norm()))
    assert best * (1 - 1e-6) <= errors[-1] <= best * 1.001
    assert errors[-1] <= errors[0]


def test_output_is_the_projection_of_the_input_onto_the_sent_basis() -> None:
    matrix = _random((30, 20))
    codec = LowRank(5)
    payload = codec.encode(matrix, codec.new_state(("test",)))
    basis, _ = payload.wire.unpack(payload.data)
    basis = basis.double()
    torch.testing.assert_close(basis.t() @ basis, torch.eye(5).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        codec.decode(payload).double(), basis @ (basis.t() @ matrix.double()), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp32"])
def test_rounding_of_the_basis_on_the_wire_is_seen_by_the_second_factor(wire_dtype: str) -> None:
    """M^T P is taken with P as it travels, so a rounded P costs no more than its own loss of orthogonality."""
    matrix = _random((30, 20))
    codec = LowRank(5, wire_dtype=wire_dtype)  # type: ignore[arg-type]
    payload = codec.encode(matrix, codec.new_state(("test",)))
    left, right = payload.wire.unpack(payload.data)
    torch.testing.assert_close(right, (left.float().t() @ matrix).to(right.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", CODECS)
def test_zero_in_zero_out(name: str) -> None:
    codec = CODECS[name]
    state = codec.new_state(("test",))
    for tensor in (torch.zeros(9, 7), torch.zeros(9, 7), _random((9, 7)), torch.zeros(9, 7)):
        decoded = codec.decode(codec.encode(tensor, state))
        assert torch.isfinite(decoded).all()
        if not tensor.any():
            assert not decoded.any()


def test_a_zero_tensor_does_not_stop_warm_start_from_working() -> None:
    codec = LowRank(2)
    state = codec.new_state(("test",))
    codec.encode(torch.zeros(30, 20), state)
    matrix = _random((30, 2)) @ _random((2, 20), seed=1)
    torch.testing.assert_close(codec.decode(codec.encode(matrix, state)), matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CODECS)
def test_non_finite_goes_out_non_finite_and_leaves_no_trace(name: str, bad: float) -> None:
    codec = CODECS[name]
    stream = CompressedStream(codec, codec.new_state(("test",)), feedback=True)
    stream.encode(_random((12, 10)))
    tensor = _random((12, 10), seed=1)
    tensor[3, 4] = bad
    assert not torch.isfinite(codec.decode(stream.encode(tensor))).all()
    after = codec.decode(stream.encode(_random((12, 10), seed=2)))
    assert torch.isfinite(after).all()
    assert all(torch.isfinite(value).all() for value in stream.state_dict().values())


@pytest.mark.parametrize("name", CODECS)
def test_any_strides(name: str) -> None:
    codec = CODECS[name]
    base = _random((6, 9, 8))
    for view in (base.transpose(0, 1), base[:, ::2], base[..., 1:5], base[:1].expand(6, 9, 8)):
        a = codec.decode(codec.encode(view, codec.new_state(("test",))))
        b = codec.decode(codec.encode(view.contiguous().clone(), codec.new_state(("test",))))
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CODECS)
def test_encoding_changes_neither_its_input_nor_the_global_random_state(name: str) -> None:
    codec = CODECS[name]
    tensor, before = _random((12, 10)), torch.get_rng_state()
    original = tensor.clone()
    stream = CompressedStream(codec, codec.new_state(("test",)), feedback=True)
    for _ in range(2):
        stream.encode(tensor)
    assert torch.equal(tensor, original)
    assert torch.equal(torch.get_rng_state(), before)


def test_same_origin_same_payload_and_other_origin_other_query() -> None:
    codec, tensor = LowRank(2), _random((30, 20))
    first, second = (codec.encode(tensor, codec.new_state((1, "cb", 3))).data for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, codec.encode(tensor, codec.new_state((1, "cb", 4))).data)
    assert not torch.equal(first, codec.encode(tensor, codec.new_state((2, "cb", 3))).data)


def test_without_warm_start_each_tensor_gets_a_new_query() -> None:
    codec, tensor = LowRank(2, warm_start=False), _random((30, 20))
    state = codec.new_state(("test",))
    assert not torch.equal(codec.encode(tensor, state).data, codec.encode(tensor, state).data)


def test_a_payload_of_another_format_is_refused() -> None:
    wire = LowRank(2).wire_format((6, 5), torch.float32)
    with pytest.raises(ValueError, match="declared"):
        wire.unpack(torch.zeros(wire.nbytes // 4 + 1))
    with pytest.raises(ValueError, match="declared"):
        wire.unpack(torch.zeros(wire.nbytes // 4, dtype=torch.int32))


def test_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="rank"):
        LowRank(0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    rank=st.integers(1, 25),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e6]),
    name=st.sampled_from(["warm", "cold", "bf16", "top-k", "top-k bf16"]),
)
def test_output_plus_memory_is_input(rows: int, columns: int, rank: int, seed: int, scale: float, name: str) -> None:
    """Over a whole sequence: all that arrived, and what is still in memory, is all that was sent."""
    codecs: dict[str, Codec] = {
        "warm": LowRank(rank),
        "cold": LowRank(rank, warm_start=False),
        "bf16": LowRank(rank, wire_dtype="bf16"),
        "top-k": TopK(match_rank=rank),
        "top-k bf16": TopK(density=rank / 25, wire_dtype="bf16"),
    }
    codec = codecs[name]
    stream = CompressedStream(codec, codec.new_state(("test",)), feedback=True)
    sent, arrived = torch.zeros(rows, columns).double(), torch.zeros(rows, columns).double()
    for index in range(4):
        tensor = _random((rows, columns), seed=seed + index) * scale
        before = stream.memory.double() if stream.memory is not None else 0.0
        decoded = codec.decode(stream.encode(tensor)).double()
        assert stream.memory is not None
        left = stream.memory.double()
        torch.testing.assert_close(decoded + left, tensor.double() + before, rtol=1e-5, atol=1e-5 * scale)
        sent += tensor.double()
        arrived += decoded
    torch.testing.assert_close(arrived + left, sent, rtol=1e-4, atol=1e-4 * scale)
    flushed = stream.flush(torch.zeros(rows, columns)).double()
    torch.testing.assert_close(arrived + flushed, sent, rtol=1e-4, atol=1e-4 * scale)
    assert stream.memory is None


def test_without_feedback_nothing_is_remembered() -> None:
    codec = LowRank(2, warm_start=False)
    stream = CompressedStream(codec, codec.new_state(("test",)), feedback=False)
    stream.encode(_random((12, 10)))
    assert stream.memory is None


@pytest.mark.parametrize("name", CODECS)
def test_state_round_trip_continues_exactly(name: str) -> None:
    codec = CODECS[name]
    original = CompressedStream(codec, codec.new_state(("test",)), feedback=True)
    for seed in range(3):
        original.encode(_random((12, 10), seed=seed))
    copy = CompressedStream(
        codec, codec.new_state(("other",) if name.startswith(STATELESS) else ("test",)), feedback=True
    )
    copy.load_state_dict({key: value.clone() for key, value in original.state_dict().items()})
    for seed in range(3, 6):
        tensor = _random((12, 10), seed=seed)
        assert torch.equal(original.encode(tensor).data, copy.encode(tensor).data)


@pytest.mark.parametrize("magnitude", [1e-9, 1e-4, 1.0, 1e4, 1e7])
def test_half_precision_on_the_wire_bears_small_and_large_gradients(magnitude: float) -> None:
    """Elements beyond what fp16 itself can hold, between 6e-8 and 65504."""
    matrix = _random((40, 6)) @ _random((6, 30), seed=1) * magnitude
    codec = LowRank(6, wire_dtype="fp16")
    state = codec.new_state(("test",))
    for _ in range(2):
        decoded = codec.decode(codec.encode(matrix, state))
        assert float((decoded - matrix).norm() / matrix.norm()) < 3e-3


def test_parts_of_several_types_are_aligned() -> None:
    parts = (Part("flags", (3,), torch.uint8), Part("values", (5,), torch.float32), Part("more", (1,), torch.int64))
    wire = WireFormat((8,), torch.float32, parts, summable=False)
    payload = wire.allocate(torch.device("cpu"))
    assert payload.dtype == torch.uint8
    assert payload.numel() == wire.nbytes == 4 + 20 + 8
    views = wire.unpack(payload.fill_(0))
    for index, view in enumerate(views):
        view.fill_(index + 1)
    assert [int(view.flatten()[0]) for view in wire.unpack(payload)] == [1, 2, 3]
    assert [view.numel() for view in views] == [3, 5, 1]


def test_what_is_left_out_can_be_remembered_after_sending() -> None:
    codec = LowRank(2)
    at_once, later = (CompressedStream(codec, codec.new_state(("test",)), feedback=True) for _ in range(2))
    for seed in range(3):
        tensor = _random((12, 10), seed=seed)
        payload = later.encode(tensor, remember=False)
        assert torch.equal(payload.data, at_once.encode(tensor).data)
        assert later.memory is None
        later.remember()
        assert later.memory is not None
        assert torch.equal(later.memory, at_once.memory)


def test_residual_of_another_shape_is_dropped() -> None:
    codec = LowRank(2)
    stream = CompressedStream(codec, codec.new_state(("test",)), feedback=True)
    stream.encode(_random((12, 10)))
    fresh = CompressedStream(codec, codec.new_state(("test",)), feedback=True)
    small = _random((6, 10))
    fresh.encode(small)
    stream.encode(small)
    assert stream.memory is not None
    assert fresh.memory is not None
    assert stream.memory.shape == fresh.memory.shape == small.shape


def _largest(values: np.ndarray[Any, Any], kept: int) -> np.ndarray[Any, Any]:
    """``values`` with all but the ``kept`` entries of largest magnitude set to zero."""
    result = np.zeros_like(values)
    chosen = np.argpartition(-np.abs(values), kept - 1)[:kept]
    result[chosen] = values[chosen]
    return result


@pytest.mark.parametrize("density", [1e-9, 0.01, 0.37, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(1,), (33, 65), (16, 2, 24), (256, 256), (3, 40000), (257, 1021)], ids=str)
def test_top_k_keeps_the_largest_of_each_block(shape: tuple[int, ...], density: float) -> None:
    numel = math.prod(shape)
    generator = np.random.default_rng(1)
    values = generator.permutation(np.arange(1, numel + 1, dtype=np.float64)) * generator.choice([-1.0, 1.0], numel)
    codec = TopK(density=density)
    wire = codec.wire_format(shape, torch.float32)
    payload = codec.encode(torch.from_numpy(values).float().view(shape))
    blocks = math.ceil(numel / BLOCK_ENTRIES)
    kept = max(blocks, math.ceil(density * numel))
    assert wire.nbytes == kept * (4 + 2)
    counts = [kept // blocks + (index < kept % blocks) for index in range(blocks)]
    expected = [_largest(part, count) for part, count in zip(np.array_split(values, blocks), counts, strict=True)]
    np.testing.assert_array_equal(codec.decode(payload).double().view(-1).numpy(), np.concatenate(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 40000), (257, 1021)], ids=str)
def test_density_one_is_exact(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec, tensor = TopK(density=1.0), _random(shape, dtype)
    assert torch.equal(codec.decode(codec.encode(tensor)), tensor)


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    codec = TopK(density=0.25)
    tensor = torch.tensor([1.0, -2.0, 2.0, 0.0, 2.0, -2.0, 1.0, 2.0])
    assert codec.decode(codec.encode(tensor)).tolist() == [0, -2, 2, 0, 0, 0, 0, 0]
    wide = torch.ones(3, BLOCK_ENTRIES // 2)
    assert codec.decode(codec.encode(wide)).view(2, -1).sum(dim=1).tolist() == [wide.numel() / 8] * 2


@pytest.mark.parametrize("wire_dtype", ["input", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rank", [1, 4, 16, 1000])
@pytest.mark.parametrize("shape", [*SHAPES, (257, 1021), (1024, 8, 3072), (16384, 32768)], ids=str)
def test_top_k_of_a_ranks_size_is_as_large_and_never_larger(shape: tuple[int, ...], rank: int, wire_dtype: Any) -> None:
    for dtype in DTYPES:
        wire = TopK(match_rank=rank, wire_dtype=wire_dtype).wire_format(shape, dtype)
        limit = LowRank(rank, wire_dtype=wire_dtype).wire_format(shape, dtype).nbytes
        entry = wire.parts[0].dtype.itemsize + wire.parts[1].dtype.itemsize
        everything = math.prod(shape) * entry
        assert wire.nbytes <= limit
        assert wire.nbytes > limit - entry or wire.nbytes == everything


@settings(max_examples=300, deadline=None)
@given(numel=st.integers(0, 2**24), share=st.floats(0, 1))
def test_blocks_cover_everything_once(numel: int, share: float) -> None:
    blocks = math.ceil(numel / BLOCK_ENTRIES)
    entries = min(max(blocks, math.ceil(share * numel)), numel)
    runs = list(top_k_blocks(numel, entries))
    assert len(runs) <= 3
    assert sum(run.count for run in runs) == blocks
    assert sum(run.count * run.size for run in runs) == numel
    assert sum(run.count * run.kept for run in runs) == entries
    assert all(run.stop == following.start for run, following in pairwise(runs))
    assert all(1 <= run.kept <= run.size <= BLOCK_ENTRIES for run in runs)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"density": 0.1, "match_rank": 4}, {"density": 0.0}, {"density": 1.5}, {"match_rank": 0}],
    ids=str,
)
def test_impossible_densities_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"density|match_rank"):
        TopK(**arguments)


CONFIGS: list[CodecConfig] = TypeAdapter(list[CodecConfig]).validate_json(
    """[
        {"name": "identity"},
        {"name": "low_rank", "rank": 3},
        {"name": "low_rank", "rank": 3, "wire_dtype": "fp16"},
        {"name": "low_rank", "rank": 1000, "wire_dtype": "fp32"},
        {"name": "top_k", "density": 0.01},
        {"name": "top_k", "match_rank": 3, "wire_dtype": "bf16"},
        {"name": "top_k", "match_rank": 1000}
    ]"""
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", [(), *SHAPES, (257, 1021), (1024, 8, 3072)], ids=str)
def test_sizes_without_torch_are_those_that_codecs_declare(config: CodecConfig, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        declared = build_codec(config).wire_format(shape, dtype)
        assert wire_nbytes(config, shape, dtype.itemsize) == declared.nbytes


def test_every_codec_has_its_size_tested() -> None:
    assert {type(config) for config in CONFIGS} == set(get_args(get_args(CodecConfig)[0]))
