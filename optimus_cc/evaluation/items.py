"""Items of zero-shot tasks in local files: ``FOLDER/TASK.jsonl``, one JSON object a line; and a look at a file of
held-out documents. Neither torch nor lm-eval."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimus_cc.config.errors import Problem
from optimus_cc.config.evaluation import EvaluationConfig
from optimus_cc.files import open_regular
from optimus_cc.paths import in_utf8
from optimus_cc.training.documents import read_json_lines
from optimus_cc.training.errors import DataError

Row = dict[str, Any]
KEY = "evaluation.data_dir"


_MATHQA_OPTION = re.compile(r"[abcd] \) .*?, |e \) .*?$")
"""lm-eval's own expression: of a to d each ends with a comma and a space, and e with the text."""


def _text(row: Mapping[str, Any], *keys: str) -> str | None:
    for key in keys:
        if key not in row:
            return f"no key {key!r} (keys of this line: {', '.join(sorted(row)[:8]) or 'none'})"
        if not isinstance(row[key], str) or not row[key].strip():
            return f"{key!r} is {json.dumps(row[key])[:60]}, not text"
    return None


def _lambada(row: Row) -> str | None:
    if (wrong := _text(row, "text")) is not None:
        return wrong
    last = row["text"].split(" ")[-1]
    return None if last.strip() else "'text' ends with a space, so it has no last word to predict"


def _piqa(row: Row) -> str | None:
    if (wrong := _text(row, "goal", "sol1", "sol2")) is not None:
        return wrong
    label = row.get("label")
    return None if type(label) is int and label in (0, 1) else f"'label' is {label!r}, not the number 0 or 1"


def _mathqa(row: Row) -> str | None:
    if (wrong := _text(row, "Problem", "options", "correct")) is not None:
        return wrong
    if not _MATHQA_OPTION.findall(row["options"]) or "a ) " not in row["options"]:
        return f"'options' is {row['options'][:60]!r}, not like 'a ) .. , b ) .. , c ) ..'"
    if row["correct"] not in tuple("abcde"):
        return f"'correct' is {row['correct']!r}, not a letter from a to e"
    return None


def _without_answer(row: Row) -> str | None:
    """Of mathqa. lm-eval counts such an item as wrong, but can't begin with one, nor show it as an example."""
    found = len(_MATHQA_OPTION.findall(row["options"]))
    if "abcde".index(row["correct"]) < found:
        return None
    return (
        f"the answer {row['correct']!r} is not among the {found} options that lm-eval finds in {row['options']!r}, "
        "as the first item's has to be, and each one's with evaluation.num_fewshot"
    )


def _winogrande(row: Row) -> str | None:
    if (wrong := _text(row, "sentence", "option1", "option2", "answer")) is not None:
        return wrong
    if "_" not in row["sentence"]:
        return "'sentence' has no _ where the options go"
    return None if row["answer"] in ("1", "2") else f'\'answer\' is {row["answer"]!r}, not the text "1" or "2"'


def _race(row: Row) -> str | None:
    if (wrong := _text(row, "article", "problems")) is not None:
        return wrong
    try:
        problems = ast.literal_eval(row["problems"])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return "'problems' is not the text of a Python list"
    if not isinstance(problems, list) or not problems:
        return "'problems' is not the text of a Python list with something in it"
    for problem in problems:
        if not isinstance(problem, dict) or not isinstance(problem.get("question"), str):
            return "an entry of 'problems' has no 'question'"
        options = problem.get("options")
        if not isinstance(options, list) or len(options) != 4 or not all(isinstance(one, str) for one in options):
            return "an entry of 'problems' has no four 'options'"
        if problem.get("answer") not in ("A", "B", "C", "D"):
            return f"the 'answer' of an entry of 'problems' is {problem.get('answer')!r}, not a letter from A to D"
    return None


SCHEMAS: dict[str, tuple[Callable[[Row], str | None], str]] = {
    "lambada_openai": (_lambada, '{"text": a passage whose last word is to be predicted}'),
    "piqa": (_piqa, '{"goal": text, "sol1": text, "sol2": text, "label": 0 or 1}'),
    "mathqa": (_mathqa, '{"Problem": text, "options": "a ) .. , b ) ..", "correct": "a"}'),
    "winogrande": (_winogrande, '{"sentence": text with a _, "option1": text, "option2": text, "answer": "1" or "2"}'),
    "race": (
        _race,
        '{"article": text, "problems": the text of a Python list of {"question", "options": [four], "answer": "A"}}',
    ),
}
"""Of each task: what is wrong with a row, and how a row looks."""
_ANY_ROW = "{..}, with the keys that the task's dataset on the Hugging Face hub has"


def path_of(data_dir: str | Path, task: str) -> Path:
    return Path(data_dir) / f"{task}.jsonl"


def read(path: Path, task: str, num_fewshot: int = 0) -> list[Row]:
    """The items of ``task`` in a file, which others of the file are examples for if ``num_fewshot`` is not 0.

    Raises:
        ValueError: it can't be read, holds none, or a line is wrong; says which, and what is expected.
    """
    check, looks_like = SCHEMAS.get(task, (lambda row: None, _ANY_ROW))
    rows: list[Row] = []
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    rows.append(_row(line, check, where, looks_like))
                    asked = task == "mathqa" and (len(rows) == 1 or num_fewshot > 0)
                    if asked and (wrong := _without_answer(rows[-1])) is not None:
                        raise ValueError(f"{where}: {wrong}")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from None
    if not rows:
        raise ValueError(f"{path} holds no items; expected is one a line: {looks_like}")
    return rows


def _row(line: bytes, check: Callable[[Row], str | None], where: str, looks_like: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 (byte {error.start + 1}); expected is {looks_like}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); expected is {looks_like}") from None
    wrong = (_surrogate(row) or check(row)) if isinstance(row, dict) else "not a JSON object"
    if wrong is not None:
        raise ValueError(f"{where}: {wrong}; expected is {looks_like}")
    found: Row = row
    return found


def _surrogate(row: Row) -> str | None:
    if in_utf8(json.dumps(row, ensure_ascii=False)):
        return None
    return "it holds half of a surrogate pair, which is not a character"


def problems(data_dir: str, tasks: Sequence[str], num_fewshot: int) -> Iterator[Problem]:
    """What is wrong with the local files of ``tasks``."""
    if not Path(data_dir).is_dir():
        yield Problem(KEY, data_dir, "a folder with a file TASK.jsonl for each task", f"{KEY}=FOLDER")
        return
    for task in tasks:
        path = path_of(data_dir, task)
        if not path.is_file():
            _, looks_like = SCHEMAS.get(task, (None, _ANY_ROW))
            others = ", ".join(sorted(file.stem for file in Path(data_dir).glob("*.jsonl"))) or "none"
            allowed = f"a folder that holds {path.name}, one item a line: {looks_like} (it holds: {others})"
            yield Problem(KEY, data_dir, allowed, "put it there, or leave the task out of evaluation.tasks")
            continue
        try:
            rows = read(path, task, num_fewshot)
        except ValueError as error:
            yield Problem(KEY, data_dir, str(error), "mend that line, or take the file anew from where it came")
            continue
        if len(rows) <= num_fewshot:
            yield Problem(
                "evaluation.num_fewshot",
                num_fewshot,
                f"fewer examples than {path} holds items ({len(rows)}); they are taken from the others of the file",
                f"evaluation.num_fewshot={len(rows) - 1}",
            )


def document_problems(settings: EvaluationConfig) -> Iterator[Problem]:
    """What is wrong with the file of held-out documents, as far as ``settings.limit`` has it read."""
    if settings.documents is None or not settings.perplexity:
        return
    path = Path(settings.documents)
    allowed, fix = "a file that holds a text", "another file, or evaluation.documents=null for the run's own documents"
    try:
        texts = filter(None, read_json_lines(path, settings.text_key, said_by="evaluation.text_key"))
        if sum(1 for _ in itertools.islice(texts, settings.limit)):
            return
    except DataError as error:
        allowed, fix = str(error), "mend that line, or give evaluation.text_key the key that holds the text"
    yield Problem("evaluation.documents", settings.documents, allowed, fix)
