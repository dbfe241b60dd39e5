"""lm-eval's own prompts and metrics on items of local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimus_cc.config.evaluation import TASKS, EvaluationConfig
from optimus_cc.evaluation import prepare, tasks
from optimus_cc.evaluation.compare import requests_of
from tests.evaluation import files


class Answers:
    """An ``LM`` that prefers what a function says."""

    def __new__(cls, prefer: Any) -> Any:
        from lm_eval.api.model import LM

        class Model(LM):
            def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
                return [(float(prefer(request)), bool(prefer(request) > 0)) for request in requests]

            def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
                raise AssertionError("none of the five asks for it")

            def generate_until(self, requests: list[Any]) -> list[str]:
                raise AssertionError("none of the five asks for it")

        return Model()


def settings(folder: Path, **more: Any) -> EvaluationConfig:
    made: Any = EvaluationConfig
    found: EvaluationConfig = made(data_dir=str(folder), **more)
    return found


def test_prompts_are_the_tasks_own(tmp_path: Path) -> None:
    """As the papers and lm-eval's descriptions have them, written out here by hand."""
    found: dict[str, list[tuple[str, str]]] = {}
    for request in requests_of(settings(files.write(tmp_path, 1))):
        found.setdefault(request.task_name, []).append(request.args)
    assert found["lambada_openai"] == [
        ("The aarn went over the hill, and behind the hill there was another", " aarn"),
    ]
    question = "Question: lift a aarn\nAnswer:"
    assert found["piqa"] == [(question, " with both hands, 0"), (question, " by the ear")]
    assert found["mathqa"] == [
        ("Question: what is 0 plus 1 ?\nAnswer:", f" {choice}") for choice in ("0", "1", "30", "40", "5")
    ]
    assert found["winogrande"] == [
        (f"The aarn did not fit into the box because the {option}", " was too large.") for option in ("aarn", "box")
    ]
    text = "Article: A aarn sat on a hill. It was red.\n\nThe aarn is red\nWhat is it?"
    assert found["race"] == [(text, f" {option}") for option in ("a bird", "a aarn", "a hill", "a box")]


def test_a_model_that_knows_all_answers_and_one_that_knows_none(tmp_path: Path) -> None:
    chosen = settings(files.write(tmp_path, 8))

    def right(request: Any) -> bool:
        row, choice = request.doc, request.args[0] + request.args[1]
        if request.task_name == "lambada_openai":
            return True
        if request.task_name == "piqa":
            return bool(choice.endswith(row["sol2" if row["label"] else "sol1"]))
        if request.task_name == "mathqa":
            return bool(choice.endswith(f" {row['options'].split(' , b ) ')[1].split(' , ')[0]}"))
        if request.task_name == "winogrande":
            return bool(row[f"option{row['answer']}"] + " was too large." in choice)
        return bool(request.idx == "ABCD".index(eval(row["problems"])[-1]["answer"]))

    best = tasks.evaluate(tasks.load(chosen), Answers(lambda request: 2.0 if right(request) else -2.0), chosen)
    worst = tasks.evaluate(tasks.load(chosen), Answers(lambda request: -2.0 if right(request) else -1.0), chosen)
    assert list(best) == list(TASKS)
    for task in TASKS:
        assert best[task]["metrics"]["acc"]["value"] == 1.0
        assert worst[task]["metrics"]["acc"]["value"] == 0.0
        assert best[task]["metrics"]["acc"]["standard_error"] == 0.0
        assert best[task]["items"] == {"evaluated": 8, "available": 8}
        assert isinstance(best[task]["version"], float)
        assert best[task]["num_fewshot"] == 0
    assert worst["lambada_openai"]["metrics"]["perplexity"]["value"] == pytest.approx(7.389, abs=1e-3)
    assert worst["lambada_openai"]["metrics"]["perplexity"]["higher_is_better"] is False
    json.dumps(best)


def test_one_item_has_no_standard_error(tmp_path: Path) -> None:
    chosen = settings(files.write(tmp_path, 4), limit=1, tasks=("piqa", "race"))
    found = tasks.evaluate(tasks.load(chosen), Answers(lambda request: -1.0), chosen)
    assert list(found) == ["piqa", "race"]
    assert found["piqa"]["items"] == {"evaluated": 1, "available": 4}
    assert found["piqa"]["metrics"]["acc"]["standard_error"] is None


def test_examples_come_from_the_other_items(tmp_path: Path) -> None:
    chosen = settings(files.write(tmp_path, 4), num_fewshot=3, tasks=("piqa",))
    found = tasks.evaluate(tasks.load(chosen), Answers(lambda request: -1.0), chosen)
    assert found["piqa"]["num_fewshot"] == 3
    seen = [request for request in requests_of(chosen) if request.idx == 0]
    assert len(seen) == 4
    for request in seen:
        *examples, asked = request.args[0].split("\n\n")
        assert len(set(examples)) == 3
        assert asked == f"Question: {request.doc['goal']}\nAnswer:"
        assert not any(request.doc["goal"] in example for example in examples)


def test_any_other_task_of_lm_eval_can_have_a_file(tmp_path: Path) -> None:
    row = {"question": "Which is wet?", "choices": {"text": ["fire", "rain"], "label": ["A", "B"]}, "answerKey": "B"}
    (tmp_path / "arc_easy.jsonl").write_text(json.dumps(row) + "\n")
    chosen = settings(tmp_path, tasks=("arc_easy",))
    found = [request.args for request in requests_of(chosen)]
    assert found == [("Question: Which is wet?\nAnswer:", " fire"), ("Question: Which is wet?\nAnswer:", " rain")]
    assert prepare.problems(chosen) == []


@pytest.mark.parametrize(
    ("name", "said"), [("hellaswg", "did you mean hellaswag"), ("lambada_openia", "did you mean lambada_openai")]
)
def test_unknown_names_get_a_suggestion(name: str, said: str) -> None:
    made: Any = EvaluationConfig
    (problem,) = prepare.problems(made(tasks=(name,)))
    assert problem.key == "evaluation.tasks"
    assert said in problem.fix


def test_tasks_that_have_text_generated_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2 #### 2"}) + "\n")
    (problem,) = prepare.problems(settings(tmp_path, tasks=("gsm8k",)))
    assert problem.value == "gsm8k"
    assert "compare likelihoods" in problem.allowed
