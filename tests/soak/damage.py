"""What happens to a run's files while nobody runs it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from optimus_cc.runs import RunFolder

LEAVES_NO_SPACE = "the disk is full"


class Damage:
    """A change of a run's folder, made when it is entered.

    Args:
        what: in words.
        make: makes it; returns what takes it back, if that is possible.
        lasts: it is taken back on leaving: an attempt is made in between, which need not come to an end then.
        words: of which one must stand in what such an attempt says if it fails.
    """

    def __init__(
        self, what: str, make: Callable[[], Callable[[], None] | None], lasts: bool = False, words: tuple[str, ...] = ()
    ) -> None:
        self._what = what
        self._make = make
        self.lasts = lasts
        self._words = words
        self._undo: Callable[[], None] | None = None

    def __str__(self) -> str:
        return self._what

    def __enter__(self) -> Damage:
        self._undo = self._make()
        return self

    def __exit__(self, *_: object) -> None:
        if self._undo is not None:
            self._undo()

    def explains(self, output: str) -> bool:
        """Whether a run that met this says so."""
        return any(word in output for word in self._words)


def random_damage(chance: random.Random, folder: RunFolder, disk: Path | None) -> Damage | None:
    """Something that can happen to the files in ``folder`` as they are now; None: nothing does."""
    kinds: list[Callable[[random.Random, RunFolder], Damage | None]] = [
        lambda chance, folder: None,
        _of_checkpoint,
        _of_checkpoint,
        _of_record,
        _leftover,
    ]
    if disk is not None:
        kinds.append(lambda chance, folder: _full(chance, disk))
    return chance.choice(kinds)(chance, folder)


def _of_checkpoint(chance: random.Random, folder: RunFolder) -> Damage | None:
    files = sorted(path for path in folder.checkpoints.glob("step_*/*") if path.is_file())
    if not files:
        return None
    path = chance.choice(files)
    how = chance.choice(sorted(WAYS))
    where = path.relative_to(folder.path)
    return Damage(f"{where} {how}", lambda: WAYS[how](path, chance.random()))


def _of_record(chance: random.Random, folder: RunFolder) -> Damage | None:
    names = ("metrics.jsonl", "status.json", "summary.json", "provenance.json", "logs/rank_0.log")
    path = folder.path / chance.choice(names)
    if not path.is_file():
        return None
    how = chance.choice(["cut", "emptied", "gone", "given a line of noise"])
    return Damage(f"{path.relative_to(folder.path)} {how}", lambda: WAYS[how](path, chance.random()))


def _leftover(chance: random.Random, folder: RunFolder) -> Damage | None:
    """What others have left behind: a link, a folder, a lock where one of ours will be wanted."""
    if not folder.path.is_dir():
        return None
    folder.checkpoints.mkdir(exist_ok=True)
    step = chance.randint(1, 9)
    partial = folder.checkpoints / f".step_{step:08d}.partial"
    final = folder.checkpoints / f"step_{step:08d}"
    ways: dict[str, Callable[[], None]] = {
        f"{partial.name} as a folder with a file": lambda: _folder_with_a_file(partial),
        f"{partial.name} as a link to nowhere": lambda: _link(partial, folder.path / "nowhere"),
        f"{partial.name} as a file": lambda: _file(partial),
        f"{final.name} as a folder with a file": lambda: _folder_with_a_file(final),
        f"{final.name} as a link to nowhere": lambda: _link(final, folder.path / "nowhere"),
        ".lock of a process that is gone": lambda: _file(folder.path / ".lock", "process 4194303 on elsewhere\n"),
        "an attempt's folder": lambda: _folder_with_a_file(folder.path / "attempts" / "7"),
    }
    what = chance.choice(sorted(ways))
    return Damage(what, ways[what])


def _full(chance: random.Random, disk: Path) -> Damage:
    left = chance.choice([0, 4_096, 65_536, 500_000])

    def fill() -> Callable[[], None]:
        filler = disk / "filler"
        free = shutil.disk_usage(disk).free
        with filler.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, free - left))
        return filler.unlink

    words = ("o space left", "can't be written", "could not be written")
    return Damage(f"{LEAVES_NO_SPACE} but for {left} bytes", fill, lasts=True, words=words)


def _cut(path: Path, share: float) -> None:
    os.truncate(path, int(share * path.stat().st_size))


def _flip(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[int(share * len(content))] ^= 1 << int(share * 8)
        path.write_bytes(content)


def _noise(path: Path, share: float) -> None:
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    place = int(share * (len(lines) + 1))
    noise = (b"\xff\x00{[", b'{"kind":"train","step":null}', b"null", b'{"step":"3"}', b"[]")[int(share * 5)]
    path.write_bytes(b"".join([*lines[:place], noise + b"\n", *lines[place:]]))


def _replaced(path: Path) -> Path:
    path.unlink()
    return path


WAYS: dict[str, Callable[[Path, float], None]] = {
    "cut": _cut,
    "with a flipped bit": _flip,
    "emptied": lambda path, share: os.truncate(path, 0),
    "gone": lambda path, share: path.unlink(),
    "given a line of noise": _noise,
    "as a folder": lambda path, share: _replaced(path).mkdir(),
    "as a link to nowhere": lambda path, share: _replaced(path).symlink_to("nowhere"),
    "as a FIFO": lambda path, share: os.mkfifo(_replaced(path)),
}


def _file(path: Path, text: str = "left behind") -> None:
    if not path.is_dir() and not path.is_symlink():
        path.write_text(text)


def _folder_with_a_file(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        path.mkdir(parents=True)
        (path / "left_behind").write_text("x")


def _link(path: Path, target: Path) -> None:
    if not path.exists() and not path.is_symlink():
        path.symlink_to(target)


@contextlib.contextmanager
def small_disk(megabytes: int, place: Path) -> Iterator[Path | None]:
    """A file system of so many megabytes, mounted in ``place``; None where that isn't allowed."""
    place.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(place)], capture_output=True, check=False
    )
    try:
        yield place if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
