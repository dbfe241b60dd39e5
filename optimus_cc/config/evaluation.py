"""``evaluation``: how a trained model is measured, after its training or by ``task=evaluate``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from optimus_cc.config.errors import Problem
from optimus_cc.config.schema import NonNegativeInt, PathText, PositiveInt, strict

TASKS = ("lambada_openai", "piqa", "mathqa", "winogrande", "race")
"""The paper's five."""


@strict
class EvaluationConfig:
    tasks: tuple[Annotated[str, Field(pattern=r"^[^\s/\\]+$")], ...] = TASKS
    """lm-eval's names of zero-shot tasks, or of groups of them; [] for none."""
    num_fewshot: NonNegativeInt = 0
    """Solved examples before each question."""
    limit: PositiveInt | None = None
    """Items of each task, and documents for perplexities: the first ones; null: all."""
    data_dir: PathText | None = None
    """Folder with a file TASK.jsonl for each task; null: from the Hugging Face hub."""
    perplexity: bool = True
    """Measure perplexities per token, word and byte on held-out documents."""
    documents: PathText | None = None
    """JSON-lines file of those documents; null: the validation documents of the run's own corpus."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """The key of evaluation.documents that holds a document's text."""
    batch_size: PositiveInt = 16
    """Sequences in one forward pass of a rank. Scores don't depend on it."""
    after_training: bool = False
    """Evaluate at the end of a training, too."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong, as far as the configuration tells; files are looked into when an evaluation is started."""
        if not self.tasks and not self.perplexity:
            yield Problem("evaluation.tasks", [], "a task, or evaluation.perplexity=true", "evaluation.tasks=[piqa]")
        for task in sorted({task for task in self.tasks if self.tasks.count(task) > 1}):
            yield Problem("evaluation.tasks", list(self.tasks), "each task once", f"name {task} once")
        if self.documents is not None and not Path(self.documents).is_file():
            yield Problem(
                "evaluation.documents",
                self.documents,
                f"a JSON-lines file with a document under {self.text_key!r} in each line",
                "check the path, or evaluation.documents=null for the run's own validation documents",
            )
