"""What computation takes: matrix products by their shapes, everything else by the bytes it moves.

A product is limited by arithmetic or by the bytes of its operands. Its arithmetic runs in tiles, which the
multiprocessors work off in waves; a short summed dimension leaves them starting and ending. A device never works faster
than its host launches kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from optimus_cc.simulation.hardware import Hardware

_TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))
"""Rows, columns, and the share of the largest tile's rate: smaller tiles read their operands more often."""
_FORWARD_KERNELS, _BACKWARD_KERNELS = 30, 60
"""Of a layer of Megatron-LM's own modules, counted roughly."""
_FUSED_SOFTMAX = 4
"""Megatron's fused softmax takes micro-batches x heads in multiples of this (``attn_batches % 4`` in its
``FusedScaleMaskSoftmax.is_kernel_available``); otherwise mask, scale, softmax and casts are kernels of their own:"""
_UNFUSED_FORWARD_KERNELS, _UNFUSED_BACKWARD_KERNELS = 16, 10
_ALIGNED_BYTES = 16
"""What tensor cores load at once: a dimension that ends in between makes a product take a slower way."""
END_KERNELS = 20
"""The same of a pass through an embedding, or through an output layer and the loss."""
_QR_S, _QR_COLUMN_S = 50e-6, 4e-6
"""See :func:`orthogonal_s`. Of a column between 2.4 and 5 microseconds were seen."""
_SHARPNESS = 3.0
"""How sharply the slower of host and device decides: some kernels of a pass are limited by one, some by the other."""


@dataclass(frozen=True)
class LayerShape:
    """What one tensor-parallel rank computes of a layer, for one micro-batch."""

    sequence: int
    micro_batch: int
    hidden: int
    ffn: int
    """Of this rank, as are heads."""
    heads: int
    head_width: int
    norm_tokens: int
    """Tokens whose norms, dropouts and residuals this rank computes: fewer with sequence parallelism."""
    itemsize: int
    gradient_itemsize: int
    dropout: bool
    parameters: int

    @property
    def tokens(self) -> int:
        return self.sequence * self.micro_batch


@dataclass(frozen=True)
class PassTime:
    """Seconds of the device, and of the host that drives it."""

    device: float
    host: float

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(self.device + other.device, self.host + other.host)

    def __mul__(self, times: float) -> PassTime:
        return PassTime(self.device * times, self.host * times)

    @property
    def seconds(self) -> float:
        """What the pass takes: a device works while its host launches what comes next."""
        if not self.host or not self.device:
            return self.device + self.host
        ratio = min(self.host, self.device) / max(self.host, self.device)
        return float(max(self.host, self.device) * (1 + ratio**_SHARPNESS) ** (1 / _SHARPNESS))


def matmul_s(hardware: Hardware, rows: int, columns: int, depth: int, itemsize: int, count: int = 1) -> float:
    """``count`` independent products of (rows, depth) and (depth, columns), on the device alone."""
    best = float("inf")
    for tile_rows, tile_columns, rate in _TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns) * count
        waves = -(-tiles // hardware.multiprocessors)
        # Tiles of the last wave that are not there take as long as the others.
        best = min(best, waves * hardware.multiprocessors * tile_rows * tile_columns / rate)
    flops = hardware.matmul_flops
    if any(size * itemsize % _ALIGNED_BYTES for size in (rows, columns, depth)):
        flops *= hardware.matmul_unaligned
    arithmetic = 2 * best * (depth + hardware.matmul_depth) / flops
    moved = count * itemsize * (rows * depth + depth * columns + rows * columns)
    return max(arithmetic, moved / hardware.memory)


@lru_cache(maxsize=4096)
def layer_s(hardware: Hardware, shape: LayerShape) -> tuple[PassTime, PassTime]:
    """Forward and backward (without recomputation) of one layer."""
    tokens, hidden, ffn = shape.tokens, shape.hidden, shape.ffn
    attention = shape.heads * shape.head_width
    size = shape.itemsize
    batch = shape.micro_batch * shape.heads

    def product(rows: int, columns: int, depth: int, count: int = 1) -> float:
        return matmul_s(hardware, rows, columns, depth, size, count)

    sequence, width = shape.sequence, shape.head_width
    forward = (
        product(tokens, 3 * attention, hidden)
        + product(sequence, sequence, width, batch)
        + product(sequence, width, sequence, batch)
        + product(tokens, hidden, attention)
        + product(tokens, ffn, hidden)
        + product(tokens, hidden, ffn)
    )
    backward = (
        product(tokens, hidden, 3 * attention)
        + product(3 * attention, hidden, tokens)
        + 2 * product(sequence, width, sequence, batch)
        + 2 * product(sequence, sequence, width, batch)
        + product(tokens, attention, hidden)
        + product(hidden, attention, tokens)
        + product(tokens, hidden, ffn)
        + product(ffn, hidden, tokens)
        + product(tokens, ffn, hidden)
        + product(hidden, ffn, tokens)
    )
    scores = batch * sequence * sequence
    dropped = 2 if shape.dropout else 0
    # Two norms, two residual sums with bias and dropout; heads taken apart and put together; GeLU.
    elements: float = (10 + dropped) * shape.norm_tokens * hidden + 4 * tokens * attention + 2 * tokens * ffn
    forward += elements * size / hardware.memory + (2 + 1.25 * dropped) * scores * size / hardware.softmax
    elements_back: float = (14 + dropped) * shape.norm_tokens * hidden + 4 * tokens * attention + 4 * tokens * ffn
    accumulated = shape.parameters * (size + 2 * shape.gradient_itemsize)  # of gradients, micro-batch by micro-batch
    backward += (elements_back * size + accumulated) / hardware.memory
    backward += (3 + 1.25 * dropped) * scores * size / hardware.softmax
    forward_kernels, backward_kernels = _FORWARD_KERNELS, _BACKWARD_KERNELS
    if batch % _FUSED_SOFTMAX:
        forward_kernels += _UNFUSED_FORWARD_KERNELS
        backward_kernels += _UNFUSED_BACKWARD_KERNELS
    kernel = hardware.kernel_s
    return PassTime(forward, forward_kernels * kernel), PassTime(backward, backward_kernels * kernel)


@lru_cache(maxsize=4096)
def attention_s(hardware: Hardware, shape: LayerShape) -> PassTime:
    """The part of a layer that selective recomputation runs again: scores, softmax, and what they weight."""
    batch, sequence, width = shape.micro_batch * shape.heads, shape.sequence, shape.head_width
    seconds = matmul_s(hardware, sequence, sequence, width, shape.itemsize, batch)
    seconds += matmul_s(hardware, sequence, width, sequence, shape.itemsize, batch)
    passes = 4.5 if shape.dropout else 2
    seconds += passes * batch * sequence * sequence * shape.itemsize / hardware.softmax
    return PassTime(seconds, _FORWARD_KERNELS // 4 * hardware.kernel_s)


def embedding_s(hardware: Hardware, tokens: int, hidden: int, itemsize: int) -> PassTime:
    """Looking tokens up, or adding their gradients."""
    return PassTime(4 * tokens * hidden * itemsize / hardware.memory, END_KERNELS * hardware.kernel_s)


def logits_s(hardware: Hardware, tokens: int, hidden: int, vocabulary: int, itemsize: int) -> tuple[PassTime, PassTime]:
    """Forward and backward of the output layer and the loss, of this rank's ``vocabulary`` rows."""
    scores = tokens * vocabulary
    forward = matmul_s(hardware, tokens, vocabulary, hidden, itemsize)
    forward += scores * (2 * itemsize + 3 * 4) / hardware.memory  # the loss is made in fp32
    backward = matmul_s(hardware, tokens, hidden, vocabulary, itemsize)
    backward += matmul_s(hardware, vocabulary, hidden, tokens, itemsize)
    backward += scores * (itemsize + 3 * 4) / hardware.memory
    host = END_KERNELS * hardware.kernel_s
    return PassTime(forward, host), PassTime(backward, host)


def optimizer_s(hardware: Hardware, parameters: float, itemsize: int, gradient_itemsize: int) -> float:
    """Of one Adam step over ``parameters`` of a rank: norm, clip, moments, weights, copies in lower precision."""
    moved = 3 * gradient_itemsize + 4 + 6 * 4 + (2 * itemsize if itemsize < 4 else 0)
    return parameters * moved / hardware.memory


def low_rank_s(hardware: Hardware, rows: int, columns: int, rank: int, itemsize: int, *, memory: bool) -> float:
    """Encoding and decoding of a matrix as two factors of ``rank`` columns.

    Args:
        memory: a residual is added before and kept after it.
    """
    products = matmul_s(hardware, rows, rank, columns, itemsize) + matmul_s(hardware, columns, rank, rows, itemsize)
    products += matmul_s(hardware, rows, columns, rank, itemsize)
    passes = 5 if memory else 0
    return products + orthogonal_s(rank) + passes * rows * columns * itemsize / hardware.memory


def orthogonal_s(rank: int) -> float:
    """Making ``rank`` columns orthogonal, by QR: each column waits for the one before, so neither rows nor rates count,
    up to some thousand rows.

    From published times of ``torch.linalg.qr`` (cuSOLVER, fp32): 53, 60 and 189 microseconds for 16 x 4, 16 x 16 and
    128 x 32 on H100 (pytorch/pytorch#173788); 74, 112 and 259 for 4096 x 4, 8192 x 8 and 512 x 64
    (flagos-ai/FlagGems#5586). None of them has 128 columns: what is said of those is a continuation of the line.
    """
    return _QR_S + rank * _QR_COLUMN_S
