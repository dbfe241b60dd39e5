"""Codecs and error memories. Knows nothing of ranks or of Megatron."""

from optimus_cc.compression.codec import Codec, CodecState, Part, Payload, WireFormat, build_codec
from optimus_cc.compression.error_feedback import CompressedStream
from optimus_cc.compression.identity import Identity
from optimus_cc.compression.low_rank import LowRank
from optimus_cc.compression.top_k import TopK

__all__ = [
    "Codec",
    "CodecState",
    "CompressedStream",
    "Identity",
    "LowRank",
    "Part",
    "Payload",
    "TopK",
    "WireFormat",
    "build_codec",
]
