"""``python -m optimus_cc.evaluation.prepare CONFIG.json``: tasks of the hub, named rightly and on this machine.

In a process of its own, because lm-eval is slow to import. Reads the ``evaluation`` group as JSON, and writes, as the
last line on stdout, a JSON list of what is wrong: objects with ``key``, ``value``, ``allowed`` and ``fix``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from optimus_cc import command
from optimus_cc.config.errors import Problem, closest
from optimus_cc.config.evaluation import EvaluationConfig
from optimus_cc.evaluation import tasks
from optimus_cc.evaluation.compare import requests_of

_KEY = "evaluation.tasks"


def problems(settings: EvaluationConfig) -> list[Problem]:
    """What is wrong with the tasks; none: their items are here."""
    try:
        loaded = tasks.load(settings)
        if settings.data_dir is not None and not tasks.generating(loaded):
            requests_of(settings)  # each item as it will be asked: lm-eval says what it can't make of one
    except tasks.UnknownTask as error:
        close = closest(error.name, error.known)
        fix = f"did you mean {' or '.join(close)}?" if close else "lm-eval ls tasks shows them all"
        return [Problem(_KEY, error.name, f"names of tasks of lm-eval {tasks.version()}", fix)]
    except Exception as error:  # whatever the hub, the network, or one of thousands of tasks comes up with
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        folder = "evaluation.data_dir=FOLDER that holds a file TASK.jsonl for each task"
        return [
            Problem(
                "evaluation.data_dir",
                settings.data_dir,
                f"items that can be had for each of {', '.join(settings.tasks)} ({said})",
                f"a network that reaches the Hugging Face hub, or {folder}",
            )
        ]
    if generating := tasks.generating(loaded):
        fix = f"leave {', '.join(generating[:4])} out"
        return [Problem(_KEY, generating[0], "tasks that compare likelihoods; this one has text generated", fix)]
    return []


def main(arguments: list[str]) -> int:
    content: Any = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    settings = TypeAdapter(EvaluationConfig).validate_json(json.dumps(content))
    print(json.dumps([asdict(problem) for problem in problems(settings)]))
    return 0


if __name__ == "__main__":
    sys.exit(command.run(lambda: main(sys.argv[1:])))
