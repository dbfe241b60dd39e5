"""Scores in every layout against lm-eval's own model for ``transformers``, of the same checkpoint exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimus_cc import checkpoints
from optimus_cc.config import RunConfig
from optimus_cc.config.evaluation import TASKS, EvaluationConfig
from optimus_cc.evaluation import items, tasks
from optimus_cc.evaluation.harness import MegatronLM
from optimus_cc.evaluation.scoring import Score
from optimus_cc.evaluation.windows import Part
from optimus_cc.training.tokenizer import Tokenizer
from tests.configurations import tiny
from tests.evaluation import files
from tests.evaluation.scores import save, scores_of_parts
from tests.ranks import RankPool

WINDOW = 96
"""Shorter than some contexts of RACE and LAMBADA."""
MODEL = {"init_std": 0.1, "sequence_length": WINDOW, "num_layers": 4}
TOLERANCE = 1e-4
LAYOUTS = {
    "single": 16,
    "tp2_pp2": 4,
    "pp4": 3,
    "pp2_dp2": 5,
}
"""And a batch size for each."""


def config(layout: str) -> RunConfig:
    sizes = {"pp2_dp2": {"pipeline_parallel_size": 2, "data_parallel_size": 2}}
    return tiny(sizes.get(layout, layout), model=MODEL)


class Whole:
    """A model on disk with its tokenizer, the items, and what lm-eval's own model answers."""

    def __init__(self, ranks: RankPool, folder: Path, data_dir: Path) -> None:
        made: Any = EvaluationConfig
        self.settings: EvaluationConfig = made(data_dir=str(data_dir), limit=8)
        self.ranks = ranks
        texts = [line for task in TASKS for line in items.path_of(data_dir, task).read_text().splitlines()]
        self.tokenizer = Tokenizer.train(texts, 700)
        self.folder = folder / "checkpoints"
        ranks.run(1, save, config("single"), self.folder)
        self.theirs = self.answers(self._of_transformers())

    def _of_transformers(self) -> Any:
        from optimus_cc.evaluation.compare import of_transformers

        found = checkpoints.newest(self.folder)
        assert found is not None
        this: Any = config("single")
        return of_transformers(replace(this, evaluation=self.settings), self.tokenizer, found)

    def ours(self, layout: str, batch_size: int) -> MegatronLM:
        def score(parts: Sequence[Sequence[Part]]) -> list[Score]:
            chosen = config(layout)
            options = {"batch_size": batch_size, "vocabulary_size": self.tokenizer.vocabulary_size}
            found = self.ranks.run(chosen.parallel.world_size, scores_of_parts, chosen, self.folder, parts, **options)
            assert all(answer == found[0] for answer in found)
            return [Score(*answer) for answer in found[0]]

        return MegatronLM(self.tokenizer, WINDOW, score)

    def answers(self, model: Any) -> tuple[list[tuple[str, float, bool]], dict[str, Any]]:
        """Each answer with its task, and the scores that come of them."""
        given: list[tuple[str, float, bool]] = []
        ask = model.loglikelihood

        def listen(requests: list[Any], disable_tqdm: bool = True) -> Any:
            found = ask(requests, disable_tqdm=disable_tqdm)
            given.extend((request.task_name, *answer) for request, answer in zip(requests, found, strict=True))
            return found

        model.loglikelihood = listen
        return given, tasks.evaluate(tasks.load(self.settings), model, self.settings)


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("agreement")
    return Whole(ranks, folder, files.REAL if files.REAL.is_dir() else files.write(folder / "items", 8))


@pytest.mark.megatron
@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_and_scores_are_those_of_transformers(whole: Whole, layout: str) -> None:
    expected, scores = whole.theirs
    found, ours = whole.answers(whole.ours(layout, LAYOUTS[layout]))
    assert {task for task, _, _ in found} == set(TASKS)
    for (task, log_likelihood, greedy), (same, theirs, likeliest) in zip(found, expected, strict=True):
        assert task == same
        assert log_likelihood == pytest.approx(theirs, abs=TOLERANCE)
        assert greedy == likeliest
    for task in TASKS:
        for metric, values in scores[task]["metrics"].items():
            for key, value in values.items():
                assert ours[task]["metrics"][metric][key] == pytest.approx(value, rel=1e-4), (task, metric, key)


def test_rolling_log_likelihoods_and_texts_without_a_context(whole: Whole) -> None:
    from lm_eval.api.instance import Instance

    def instance(kind: str, *arguments: str) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    text = items.path_of(Path(str(whole.settings.data_dir)), "race").read_text()[:2000]
    short = text[:37]
    theirs, ours = whole._of_transformers(), whole.ours("pp2_dp2", 3)
    rolling = [instance("loglikelihood_rolling", text), instance("loglikelihood_rolling", short)]
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), abs=1e-3)
    without = [instance("loglikelihood", "", short), instance("loglikelihood", "", f"  {short}")]
    without += [instance("loglikelihood", text, f" {short}"), instance("loglikelihood", "a word ", "and  another")]
    for (ours_, greedy), (theirs_, likeliest) in zip(
        ours.loglikelihood(without), theirs.loglikelihood(without), strict=True
    ):
        assert ours_ == pytest.approx(theirs_, abs=TOLERANCE)
        assert greedy == likeliest
    # lm-eval's own model can't be asked this: blanks go to the continuation, and nothing is left of the context.
    assert ours.loglikelihood([instance("loglikelihood", "  ", short)]) == ours.loglikelihood([without[1]])


def test_continuations_that_share_tokens_with_their_context() -> None:
    """lm-eval's own model fails where no token is left; elsewhere the tokens are the ones that it asks for."""
    from lm_eval.api.model import TemplateLM

    tokenizer = Tokenizer.train(["你好"] * 50 + ["ab abc"] * 50, 400)
    asked: list[Part] = []

    def score(requests: Sequence[Sequence[Part]]) -> list[Score]:
        asked.extend(part for parts in requests for part in parts)
        return [Score(-1.0, False) for _ in requests]

    model = MegatronLM(tokenizer, 64, score)
    whole, first = tokenizer.encode("你好"), tokenizer.encode("你")
    assert len(whole) <= len(first)
    model._loglikelihood_tokens([(("你", "好"), *model._encode_pair("你", "好"))])
    (part,) = asked
    assert tokenizer.decode([*part.inputs, *part.targets[-1:]]) == "你好"
    assert tokenizer.decode(part.targets) == "好"
    for pair in (("ab ", "abc"), ("ab", " abc"), ("a", "bc ab")):
        assert model._encode_pair(*pair) == TemplateLM._encode_pair(model, *pair)


def test_generation_says_that_it_is_not_there(whole: Whole) -> None:
    with pytest.raises(NotImplementedError, match="generates none"):
        whole.ours("single", 1).generate_until([])
