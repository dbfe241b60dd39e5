"""A figure is the same whatever its caller thinks of matplotlib."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HOSTILE = """text.usetex: True
font.family: serif
axes.prop_cycle: cycler('color', ['ff0000'])
axes.facecolor: 00ff00
savefig.bbox: tight
svg.fonttype: none
"""
SCRIPT = """
import hashlib
from paper_figures import style
def draw(figure):
    axes = figure.add_subplot()
    axes.plot([1, 3, 2], label="a_b")
    axes.legend()
pictures = style.render(draw, (3, 2))
print({suffix: hashlib.sha256(content).hexdigest() for suffix, content in pictures.items()})
"""


def _drawn(**environment: str) -> str:
    bare = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "MATPLOTLIBRC")}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**bare, **environment}, capture_output=True, text=True, check=True
    )
    return found.stdout


def test_a_callers_matplotlib_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text(HOSTILE)
    usual = _drawn()
    assert ".svg" in usual
    for backend in ("module://matplotlib_inline.backend_inline", "module://nobody.has_this"):
        assert _drawn(MPLBACKEND=backend, MATPLOTLIBRC=str(tmp_path)) == usual
