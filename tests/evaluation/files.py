"""Small files of the five tasks, and where the real items lie if they are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimus_cc.config.evaluation import TASKS
from tests.shared import SHARED

REAL = SHARED / "data" / "zero_shot"
"""Real items, 32 to 64 of each task."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def real_items() -> Path:
    if not REAL.is_dir():
        pytest.skip(f"there are no real items in {REAL}; OPTIMUS_CC_SHARED=FOLDER says where they are")
    return REAL


def rows(task: str, number: int) -> dict[str, Any]:
    """A row of a task, different for each number."""
    word = f"{LETTERS[number % 26]}{LETTERS[number % 7]}rn"
    if task == "lambada_openai":
        return {"text": f"The {word} went over the hill, and behind the hill there was another {word}"}
    if task == "piqa":
        return {
            "goal": f"lift a {word}",
            "sol1": f"with both hands, {number}",
            "sol2": "by the ear",
            "label": number % 2,
        }
    if task == "mathqa":
        options = f"a ) {number} , b ) {number + 1} , c ) 30 , d ) 40 , e ) 5"
        return {"Problem": f"what is {number} plus 1 ?", "options": options, "correct": "b"}
    if task == "winogrande":
        sentence = f"The {word} did not fit into the box because the _ was too large."
        return {"sentence": sentence, "option1": word, "option2": "box", "answer": str(1 + number % 2)}
    problems = [
        {"question": f"The {word} is  _  .", "options": ["old", "red", "far", "wet"], "answer": "B"},
        {
            "question": "What is it?",
            "options": ["a bird", f"a {word}", "a hill", "a box"],
            "answer": "ABCD"[number % 4],
        },
    ]
    return {"article": f"A {word} sat on a hill. It was red.", "problems": repr(problems)}


def write(folder: Path, count: int = 4) -> Path:
    """A file for each task."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        text = "".join(json.dumps(rows(task, number)) + "\n" for number in range(count))
        (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")
    return folder
