"""Local files of items: what is wrong with them is said with file, line and what is expected."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from optimus_cc.config.evaluation import TASKS, EvaluationConfig
from optimus_cc.evaluation import items
from tests.evaluation import files


def test_right_files_have_no_problems(tmp_path: Path) -> None:
    assert list(items.problems(str(files.write(tmp_path)), TASKS, 3)) == []


def test_the_real_items_have_no_problems() -> None:
    folder = files.real_items()
    assert list(items.problems(str(folder), TASKS, 0)) == []
    assert {task: len(items.read(items.path_of(folder, task), task)) for task in TASKS} == {
        "lambada_openai": 64,
        "piqa": 64,
        "mathqa": 64,
        "winogrande": 64,
        "race": 32,
    }


BROKEN: list[tuple[str, Any, str]] = [
    ("lambada_openai", {"txt": "a b"}, "no key 'text' (keys of this line: txt)"),
    ("lambada_openai", {"text": 3}, "'text' is 3, not text"),
    ("lambada_openai", {"text": "no last word "}, "ends with a space"),
    ("piqa", {"goal": "a", "sol1": "b", "sol2": "c", "label": "1"}, "'label' is '1'"),
    ("piqa", {"goal": "a", "sol1": "b", "sol2": "c", "label": True}, "'label' is True"),
    ("piqa", {"goal": "a", "sol1": "b", "label": 1}, "no key 'sol2'"),
    ("mathqa", {"Problem": "a", "options": "1, 2", "correct": "a"}, "not like 'a ) .. ,"),
    ("mathqa", {"Problem": "a", "options": "a ) 1 , b ) 2", "correct": "f"}, "'correct' is 'f'"),
    ("winogrande", {"sentence": "a", "option1": "b", "option2": "c", "answer": "1"}, "no _"),
    ("winogrande", {"sentence": "a _", "option1": "b", "option2": "c", "answer": 1}, "'answer' is 1, not text"),
    ("winogrande", {"sentence": "a _", "option1": "b", "option2": "c", "answer": "3"}, "'answer' is '3'"),
    ("race", {"article": "a", "problems": "__import__('os').abort()"}, "not the text of a Python list"),
    ("race", {"article": "a", "problems": "[]"}, "something in it"),
    ("race", {"article": "a", "problems": "[{'question': 'b', 'options': ['c'], 'answer': 'A'}]"}, "no four 'options'"),
    (
        "race",
        {"article": "a", "problems": "[{'question': 'b', 'options': ['c'] * 4, 'answer': 'A'}]"},
        "not the text of a Python list",
    ),
    (
        "race",
        {"article": "a", "problems": "[{'question': 'b', 'options': ['c', 'd', 'e', 'f'], 'answer': 'E'}]"},
        "'answer' of an entry of 'problems' is 'E'",
    ),
    ("piqa", [1], "not a JSON object"),
    ("piqa", {"goal": "\ud800", "sol1": "b", "sol2": "c", "label": 1}, "half of a surrogate pair"),
    ("race", {"article": "a", "problems": "[]", "more": ["\udc00"]}, "half of a surrogate pair"),
    ("mathqa", {"Problem": "a", "options": "a ) 1", "correct": "a"}, "not like 'a ) .. ,"),
]


@pytest.mark.parametrize(("task", "row", "said"), BROKEN)
def test_a_broken_row_is_named_by_its_line(tmp_path: Path, task: str, row: Any, said: str) -> None:
    path = items.path_of(files.write(tmp_path), task)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "", json.dumps(row), *lines[2:]]) + "\n")
    (problem,) = items.problems(str(tmp_path), TASKS, 0)
    assert f"{path}, line 4" in problem.allowed
    assert said in problem.allowed
    assert f"expected is {items.SCHEMAS[task][1]}" in problem.allowed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "cut o', "line 1: not JSON"),
        (b'{"text": "\xff"}\n', "line 1: not UTF-8"),
        (b"\n\n", "holds no items"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, content: bytes, said: str) -> None:
    items.path_of(files.write(tmp_path), "lambada_openai").write_bytes(content)
    (problem,) = items.problems(str(tmp_path), TASKS, 0)
    assert said in problem.allowed
    assert "expected is" in problem.allowed


def test_a_missing_file_says_what_to_put_where(tmp_path: Path) -> None:
    items.path_of(files.write(tmp_path), "race").unlink()
    (problem,) = items.problems(str(tmp_path), TASKS, 0)
    assert "race.jsonl" in problem.allowed
    assert items.SCHEMAS["race"][1] in problem.allowed
    assert "lambada_openai, mathqa, piqa, winogrande" in problem.allowed
    (problem,) = items.problems(str(tmp_path / "nowhere"), TASKS, 0)
    assert problem.value == str(tmp_path / "nowhere")


def test_examples_have_to_be_other_items(tmp_path: Path) -> None:
    problems = list(items.problems(str(files.write(tmp_path, 3)), TASKS, 3))
    assert {problem.key for problem in problems} == {"evaluation.num_fewshot"}
    assert len(problems) == len(TASKS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"body": "one"}\n{"body": "cut o', "line 2: not JSON"),
        (b'{"body": "one"}\n\n{"text": "two"}\n', "line 3: no key 'body'"),
        (b'{"body": "\xff"}\n', "line 1: not UTF-8"),
        (b'{"body": 5}\n', "line 1: 'body' holds a JSON number"),
        (b'\n{"body": " "}\n', "holds a text"),
        (b"", "holds a text"),
    ],
)
def test_documents_that_hold_something_else(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_bytes(content)
    this: Any = EvaluationConfig(documents=str(path), text_key="body")
    (problem,) = items.document_problems(this)
    assert (problem.key, problem.value) == ("evaluation.documents", str(path))
    assert said in problem.allowed
    assert "data.text_key" not in problem.allowed
    assert not list(items.document_problems(dataclasses.replace(this, perplexity=False)))
    # What is not read is not looked at.
    assert bool(list(items.document_problems(dataclasses.replace(this, limit=1)))) == (b'"one"' not in content)


def test_mathqa_answers_that_lm_eval_does_not_find(tmp_path: Path) -> None:
    """Of a to d an option ends with a comma: the last of four is none, which real items have, too."""
    path = items.path_of(files.write(tmp_path), "mathqa")
    lines = path.read_text().splitlines()
    lost = json.dumps({"Problem": "a", "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4", "correct": "d"})
    for position, num_fewshot, wrong in ((0, 0, True), (2, 0, False), (2, 1, True)):
        path.write_text("\n".join([*lines[:position], lost, *lines[position:]]) + "\n")
        found = list(items.problems(str(tmp_path), ["mathqa"], num_fewshot))
        assert [f"{path}, line {position + 1}" in problem.allowed for problem in found] == [True] * wrong
        settings: Any = EvaluationConfig
        asked = settings(data_dir=str(tmp_path), tasks=("mathqa",), num_fewshot=num_fewshot)
        if not wrong:
            from optimus_cc.evaluation.compare import requests_of

            assert len(requests_of(asked)) == 5 * len(lines) + 3
