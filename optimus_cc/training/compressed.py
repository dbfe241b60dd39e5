"""Lines of files that may be compressed; how, their first bytes tell and not their names. Never imports torch."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from optimus_cc.files import open_regular

_CHUNK_BYTES = 2**20
_MAX_WINDOW_BYTES = 2**31
"""The largest that ``zstd --long=31`` makes; a frame takes as much memory as its own needs."""
_GZIP, _BZIP2, _XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00"
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + kind]) + b"\x2a\x4d\x18" for kind in range(16)))
"""A frame, and frames to be skipped."""
_OTHERS = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x04\x22\x4d\x18": "compressed with lz4",
}


class Damaged(ValueError):
    """What is wrong with a compressed file."""


def lines(path: Path) -> Iterator[bytes]:
    """Each line of a file, plain or compressed with gzip, bzip2, xz or zstd.

    Raises:
        OSError: it can't be read.
        Damaged: it is damaged or cut off, or compressed in another way.
    """
    with open_regular(path) as raw:
        magic = raw.read(6)
        raw.seek(0)
        for other, what in _OTHERS.items():
            if magic.startswith(other):
                raise Damaged(f"the file is {what}; gzip, bzip2, xz and zstd are read")
        try:
            yield from _zstd_lines(raw) if magic.startswith(_ZSTD) else _opened(raw, magic)
        except OSError as error:
            if error.errno is not None:
                raise
            raise Damaged(f"the compressed data is damaged or cut off ({error})") from None  # as bzip2 and gzip say it
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise Damaged(f"the compressed data is damaged or cut off ({error})") from None


def _opened(raw: BinaryIO, magic: bytes) -> Iterator[bytes]:
    if magic.startswith(_GZIP):
        with gzip.GzipFile(fileobj=raw) as file:
            yield from file
    elif magic.startswith(_BZIP2):
        with bz2.BZ2File(raw) as file:
            yield from file
    elif magic.startswith(_XZ):
        with lzma.LZMAFile(raw) as file:
            yield from file
    else:
        yield from raw


def _zstd_lines(raw: BinaryIO) -> Iterator[bytes]:
    import zstandard

    rest = b""
    try:
        for chunk in _zstd_chunks(raw):
            *complete, rest = (rest + chunk).split(b"\n")
            yield from complete
    except zstandard.ZstdError as error:
        raise Damaged(f"the compressed data is damaged or cut off ({error})") from None
    if rest:
        yield rest


def _zstd_chunks(raw: BinaryIO) -> Iterator[bytes]:
    """Decompressed pieces of a file of zstd frames."""
    # The package's stream reader takes a file that is cut off for a complete one, hence the frame by frame loop.
    import zstandard

    frame = None
    while chunk := raw.read(_CHUNK_BYTES):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
            yield frame.decompress(chunk)
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("end of file before the end of the zstd frame")
