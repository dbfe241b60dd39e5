"""The scripts under examples/ run as their first lines say."""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(script: str, *arguments: str) -> str:
    """What a script prints when it is started as the first lines of its docstring say, with more arguments."""
    path = ROOT / "examples" / script
    documented = ast.get_docstring(ast.parse(path.read_text()))
    assert documented is not None
    found = re.search(r"^ +torchrun (.*(?:\n +--.*)*)", documented, re.MULTILINE)
    assert found, f"{script} does not say how it is started"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(found[1]), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = process.communicate(timeout=900)
        except BaseException:
            process.terminate()  # torchrun ends its ranks when it is asked to; killed, it would leave them behind
            raise
    assert process.returncode == 0, errors[-3000:]
    return output


@pytest.mark.megatron
def test_attach_in_a_plain_megatron_script() -> None:
    output = _run("attach_to_megatron.py")
    found = re.findall(r"step (\d+): loss ([\d.]+), last stage sent (\d+) bytes backward of (\d+)", output)
    assert [int(step) for step, *_ in found] == [5, 10, 15, 20]
    losses = [float(loss) for _, loss, *_ in found]
    assert losses[-1] < losses[0]
    # Eight messages of 64 x 4 tokens and 64 hidden units; one of them as two factors of rank 4.
    message, payload = 64 * 4 * 64 * 4, (64 * 4 + 64) * 4 * 4
    assert {(int(wire), int(logical)) for *_, wire, logical in found} == {(7 * message + payload, 8 * message)}


def _megatron_training_is_there() -> bool:
    return importlib.util.find_spec("megatron.training") is not None


needs_megatron_training = pytest.mark.skipif(
    not _megatron_training_is_there(),
    reason="megatron.training is not installed: megatron-core has it from 0.19 on, which needs Python 3.12",
)


@functools.cache
def _megatron_lm(technique: str) -> str:
    return _run("attach_to_megatron_lm.py", "--technique", technique)


def _training(output: str) -> list[tuple[int, str, str]]:
    """Step, loss and gradient norm, as Megatron-LM prints them."""
    found = re.findall(r" iteration +(\d+)/.* lm loss: (\S+) .*grad norm: (\S+) ", output)
    return [(int(step), loss, norm) for step, loss, norm in found]


def _evaluation(output: str) -> list[str]:
    return re.findall(r"validation loss at .*lm loss value: (\S+) ", output)


@pytest.mark.megatron
@needs_megatron_training
def test_attached_with_nothing_to_compress_megatron_lm_trains_as_without() -> None:
    untouched, attached = _megatron_lm("none"), _megatron_lm("baseline")
    assert [step for step, *_ in _training(untouched)] == list(range(1, 11))
    assert len(_evaluation(untouched)) == 4  # after steps 5 and 10, then on the validation and the test set
    assert _training(attached) == _training(untouched)
    assert _evaluation(attached) == _evaluation(untouched)


@pytest.mark.megatron
@needs_megatron_training
def test_compressed_backpropagation_in_megatron_lms_loop() -> None:
    output, baseline = _megatron_lm("cb"), _megatron_lm("baseline")
    losses, uncompressed = ([float(loss) for _, loss, _ in _training(text)] for text in (output, baseline))
    assert len(losses) == 10
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] == uncompressed[0]  # nothing compressed has reached a weight yet
    assert losses[1:] != uncompressed[1:]
    sent = {
        (int(rank), name): (int(wire), int(logical))
        for rank, name, wire, logical in re.findall(r"rank (\d) sent (\w+): (\d+) bytes of (\d+)", output)
    }
    # A step has eight messages of 64 x 4 tokens and 64 hidden units. Backward, stage p sends its last 4 - p as two
    # factors of rank 4. Forward there are also four evaluations with as many messages.
    message, payload, steps, evaluations = 64 * 4 * 64 * 4, (64 * 4 + 64) * 4 * 4, 10, 4
    for stage in range(4):
        backward = 8 * message if stage > 0 else 0
        compressed = (4 + stage) * message + (4 - stage) * payload if stage > 0 else 0
        forward = 8 * message if stage < 3 else 0
        assert sent[stage, "pipeline_backward"] == (steps * compressed, steps * backward)
        assert sent[stage, "pipeline_forward"] == ((steps + evaluations) * forward,) * 2
