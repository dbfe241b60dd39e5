"""The scripts under examples/ run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.megatron
def test_attach_in_a_plain_megatron_script() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    result = subprocess.run(
        [*command, str(ROOT / "examples" / "attach_to_megatron.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = re.findall(r"step (\d+): loss ([\d.]+), last stage sent (\d+) bytes backward of (\d+)", result.stdout)
    assert [int(step) for step, *_ in found] == [5, 10, 15, 20]
    losses = [float(loss) for _, loss, *_ in found]
    assert losses[-1] < losses[0]
    # Eight messages of 64 x 4 tokens and 64 hidden units; one of them as two factors of rank 4.
    message, payload = 64 * 4 * 64 * 4, (64 * 4 + 64) * 4 * 4
    assert {(int(wire), int(logical)) for *_, wire, logical in found} == {(7 * message + payload, 8 * message)}
