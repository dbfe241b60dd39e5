"""The checkpoints of a run folder as files: which are there, which are complete. Without torch.

``checkpoints/step_00000120/`` is written under another name, ``.step_00000120.partial``, and gets its own when all of
it is on the disk. Its ``manifest.json`` says what it holds: the size and the CRC-32 of every file, the step, the run,
the configuration that made it, and a CRC-32 of all this.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_cc.files import open_regular
from optimus_cc.records import from_json, read_json_object, replace_file, to_json

MANIFEST = "manifest.json"
_OWN_CHECKSUM = "manifest_crc32"
_NAME = re.compile(r"step_(\d{8,})")
_PARTIAL = re.compile(r"\.step_\d{8,}\.partial(\.\d+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that has the name of a complete checkpoint; :meth:`problem` says whether it is one."""

    path: Path
    step: int

    def manifest(self) -> dict[str, Any] | None:
        """What it says about itself, ``files`` and ``scientific`` being mappings; None if that can't be read, was
        changed, or belongs to another step."""
        manifest = read_json_object(self.path / MANIFEST)
        if manifest is None or manifest.get("step") != self.step:
            return None
        if any(not isinstance(manifest.get(key), Mapping) for key in ("files", "scientific")):
            return None
        # Those from before there was one have none.
        if _OWN_CHECKSUM in manifest and manifest.pop(_OWN_CHECKSUM) != _checksum(manifest):
            return None
        return manifest

    def problem(self) -> str | None:
        """Why it can't be used, as far as names and sizes tell; None if it looks complete."""
        manifest = self.manifest()
        if manifest is None:
            return f"its {MANIFEST} can't be read"
        for path in self.path.rglob("*"):
            if path.exists() and not (path.is_file() or path.is_dir()):
                return f"{path.relative_to(self.path)} is not a regular file"
        for name, entry in manifest["files"].items():
            try:
                size = (self.path / name).stat().st_size
            except (OSError, ValueError):
                return f"{name} is missing"
            if not isinstance(entry, Mapping) or size != entry.get("bytes"):
                return f"{name} has {size} bytes, not those it was written with"
        return None

    def damaged_files(self, part: int = 0, parts: int = 1) -> list[str]:
        """Files whose content isn't what was written; looks at every ``parts``-th one, from number ``part`` on."""
        manifest = self.manifest()
        files = sorted((manifest or {}).get("files", {}).items())
        return [name for name, entry in files[part::parts] if file_record(self.path / name) != entry]

    @property
    def nbytes(self) -> int:
        """What it takes on the disk."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())


def at(path: Path) -> Checkpoint | None:
    """The checkpoint that a folder is named like; None if it isn't, or is not there."""
    match = _NAME.fullmatch(path.name)
    return Checkpoint(path, int(match[1])) if match and path.is_dir() else None


def all_in(folder: Path) -> list[Checkpoint]:
    """What is named like a checkpoint in a ``checkpoints`` folder, newest first."""
    found: list[Checkpoint] = []
    with contextlib.suppress(OSError):
        found = [one for path in folder.iterdir() if (one := at(path)) is not None]
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def newest(folder: Path) -> Checkpoint | None:
    """The newest one that looks complete."""
    return next((checkpoint for checkpoint in all_in(folder) if checkpoint.problem() is None), None)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def partial_path(folder: Path, step: int) -> Path:
    """Where a checkpoint is until all of it is there, and while it is removed: a name that nothing has."""
    name = f".{path_of(folder, step).name}.partial"
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return next(path for path in map(folder.joinpath, names) if not path.exists() and not path.is_symlink())


def remove_partial(folder: Path) -> None:
    """Remove what saves that were interrupted have left; what can't be removed stays, and is in nobody's way."""
    for path in _partial_in(folder):
        with contextlib.suppress(OSError):
            _remove_tree(path)


def remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint; one that is half removed doesn't look like one. Of a link only the link goes.

    Raises:
        OSError: something of it is still there.
    """
    doomed = partial_path(checkpoint.path.parent, checkpoint.step)
    checkpoint.path.rename(doomed)
    _remove_tree(doomed)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Complete a checkpoint: ``manifest``, and a checksum of it, as ``folder``'s."""
    # As it will be read: what isn't UTF-8 is replaced in the file.
    plain = from_json(to_json(manifest).encode("utf-8", errors="replace"))
    replace_file(folder / MANIFEST, to_json({**plain, _OWN_CHECKSUM: _checksum(plain)}, indent=1) + "\n")


def file_record(path: Path) -> dict[str, int] | None:
    """Size and CRC-32 of a file; None if it can't be read."""
    checksum = size = 0
    try:
        with open_regular(path) as file:
            while block := file.read(2**20):
                checksum = zlib.crc32(block, checksum)
                size += len(block)
    except (OSError, ValueError):
        return None
    return {"bytes": size, "crc32": checksum}


def _partial_in(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _PARTIAL.fullmatch(path.name):
                yield path


def _checksum(manifest: Mapping[str, Any]) -> int:
    """CRC-32 of what a manifest says, however it is laid out."""
    return zlib.crc32(to_json(manifest).encode("utf-8", errors="replace"))


def _remove_tree(path: Path) -> None:
    """Remove all that can be removed of a folder, or a link; an OSError says why some of it can't."""
    if path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            raise
