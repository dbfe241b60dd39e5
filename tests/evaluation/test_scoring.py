"""Log-probabilities on the pipelined schedules against a plain pass through the whole model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.configurations import SEQUENCE, VOCABULARY, tiny
from tests.evaluation.scores import Request, save, scores, whole_logits
from tests.ranks import RankPool

MODEL = {"init_std": 0.2, "num_layers": 8}  # weights that make some tokens likely
REAL = VOCABULARY - 24
"""Tokens that exist; the rest pads the embedding."""
TOLERANCE = 1e-4


def requests() -> list[Request]:
    """Contexts of all lengths, too long ones as well, choices after one context, and continuations of all lengths."""
    generator = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(REAL) for _ in range(count)]

    found = [(tokens(length), tokens(1 + length % 3)) for length in (1, 2, 5, 13, 14, 15, 16, 17, 40)]
    found += [(tokens(3), tokens(length)) for length in (SEQUENCE - 1, SEQUENCE)]
    context = tokens(9)
    found += [(context, [choice]) for choice in tokens(5)]
    found += [(context, [*found[-1][1], 7]), (context[:4], [*context[4:], 3])]  # that share inputs with others
    return found


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scoring") / "checkpoints"
    ranks.run(1, save, tiny("single", model=MODEL), folder)
    return folder


@pytest.fixture(scope="module")
def asked(ranks: RankPool, saved: Path) -> list[Request]:
    """The requests, and continuations that are the likeliest ones."""
    plain = requests()
    rows = [context[-SEQUENCE:] for context, _ in plain]
    (logits,) = ranks.run(1, whole_logits, tiny("single", model=MODEL), saved, rows)
    best = [int(logit[-1, :REAL].argmax()) for logit in logits]
    return plain + [(context, [token]) for (context, _), token in zip(plain, best, strict=True)]


@pytest.fixture(scope="module")
def expected(ranks: RankPool, saved: Path, asked: list[Request]) -> list[tuple[float, bool]]:
    rows = [[*context, *target][-(SEQUENCE + 1) :] for context, target in asked]
    (logits,) = ranks.run(1, whole_logits, tiny("single", model=MODEL), saved, [row[:-1] for row in rows])
    answers = []
    for (_, target), logit in zip(asked, logits, strict=True):
        logit = logit[-len(target) :, :REAL]
        chosen = torch.tensor(target)
        log_probabilities = logit.log_softmax(-1).gather(1, chosen.unsqueeze(1))
        answers.append((float(log_probabilities.sum()), bool((logit.argmax(-1) == chosen).all())))
    assert {greedy for _, greedy in answers} == {True, False}
    return answers


@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["single", "tp2", "pp4", "tp2_pp2_dp2", "pp2_v2_overlap"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_those_of_a_plain_pass_in_every_layout(
    ranks: RankPool,
    saved: Path,
    asked: list[Request],
    expected: list[tuple[float, bool]],
    layout: str,
    batch_size: int,
) -> None:
    config = tiny(layout, model=MODEL)
    world = config.parallel.world_size
    found = ranks.run(world, scores, config, saved, asked, batch_size=batch_size, vocabulary_size=REAL)
    assert all(answer == found[0] for answer in found[1:])
    for (log_probability, greedy), (wanted, likeliest) in zip(found[0], expected, strict=True):
        assert log_probability == pytest.approx(wanted, abs=TOLERANCE)
        assert greedy == likeliest


def test_a_continuation_longer_than_the_window_counts_each_token_once(ranks: RankPool, saved: Path) -> None:
    generator = random.Random(1)
    context, target = [3, 4, 5], [generator.randrange(REAL) for _ in range(2 * SEQUENCE + 5)]
    (found,) = ranks.run(1, scores, tiny("single", model=MODEL), saved, [(context, target)], vocabulary_size=REAL)
    before = [context[-1], *target]
    rows, counts = [], []
    for start in range(0, len(target), SEQUENCE):  # windows that overlap as little as they can
        end = min(start + SEQUENCE, len(target))
        rows.append(before[max(0, end - SEQUENCE) : end])
        counts.append(end - start)
    (logits,) = ranks.run(1, whole_logits, tiny("single", model=MODEL), saved, rows)
    total, position = 0.0, 0
    for logit, count in zip(logits, counts, strict=True):
        chosen = torch.tensor(target[position : position + count]).unsqueeze(1)
        total += float(logit[-count:, :REAL].log_softmax(-1).gather(1, chosen).sum())
        position += count
    assert found[0][0] == pytest.approx(total, abs=TOLERANCE)
