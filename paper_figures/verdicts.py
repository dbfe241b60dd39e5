"""A verdict on every claim of the paper: reproduced, not reproduced, or not tested here; with evidence and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from analysis import statistics
from paper_figures.data import Data, Selection
from paper_figures.item import Missing, Query

Word = Literal["reproduced", "not reproduced", "not tested here"]
WORDS: tuple[Word, ...] = ("reproduced", "not reproduced", "not tested here")


@dataclass(frozen=True)
class Verdict:
    """What became of one claim."""

    word: Word
    why: str
    evidence: str = ""
    """What was measured or predicted."""
    scale: str = ""
    runs: tuple[str, ...] = ()
    claim: str = ""
    """Its id."""
    says: str = ""


Judge = Callable[[Data, Mapping[str, Any]], Verdict]
DIVERGED = "It diverged where the other one did not."
_JUDGES: dict[str, Judge] = {}


def judge(*claims: str) -> Callable[[Judge], Judge]:
    """Registers what decides some claims, by id."""

    def register(function: Judge) -> Judge:
        _JUDGES.update(dict.fromkeys(claims, function))
        return function

    return register


def verdicts(data: Data) -> list[Verdict]:
    """One for each claim, in their order."""
    import paper_figures.judges
    import paper_figures.simulated_judges  # noqa: F401  (both register them)

    found = []
    for claim in data.paper["claims"]:
        data.item = f"claim {claim['id']}"
        try:
            verdict = _JUDGES[claim["id"]](data, claim)
        except Missing as missing:
            verdict = Verdict("not tested here", f"Missing: {missing}. To make it: {missing.command}")
        found.append(replace(verdict, claim=claim["id"], says=claim["says"]))
    data.item = ""
    return found


def measured(selection: Selection, word: Word, why: str, evidence: str, techniques: Sequence[str]) -> Verdict:
    """With the runs of some techniques as evidence."""
    runs = selection.runs[selection.runs["technique"].isin(techniques)]
    if not selection.of_paper:
        why += " At this size, which is far below the paper's."
    return Verdict(word, why, evidence, selection.scale, tuple(runs["run"]))


def compared(
    data: Data,
    query: Query,
    technique: str,
    if_diverged: Word,
    judged: Callable[[Selection, statistics.Comparison], tuple[Word, str, str]],
) -> Verdict:
    """By the perplexity of one technique against that of the query's baseline, over the seeds that both have.

    Args:
        if_diverged: the word if it diverged where the baseline did not.
        judged: word, why and evidence otherwise.
    """
    selection, pair = data.select(query), (query.baseline, technique)
    if gone := selection.only_diverged(technique, query.baseline):
        return measured(selection, if_diverged, DIVERGED, gone, pair)
    comparison = selection.compare(technique, "validation_token_perplexity")
    if comparison is None:
        command = query.extra_command if technique in query.extra else query.command
        raise Missing(f"runs of {query.baseline} and {technique} with the same seed", command)
    return measured(selection, *judged(selection, comparison), pair)


def noted(data: Data, word: Word, why: str, evidence: str) -> Verdict:
    """With the runs and the scale that the claim's own selection has noted."""
    scale = data.notes[data.item][0].removeprefix("Measured: ").removesuffix(".")
    return Verdict(word, why, evidence, scale, tuple(sorted(data.used[data.item])))


def judged_worse(comparison: statistics.Comparison, note: str = "") -> tuple[Word, str, str]:
    """Word, why and evidence for the claim that the second one is worse."""
    evidence = f"Perplexity {comparison.baseline:.2f} and {comparison.baseline + comparison.difference.value:.2f}; "
    evidence += comparison.text()
    if comparison.p_different is None:
        return "not tested here", "One seed gives no interval; a test takes two or more.", evidence
    significant = comparison.p_different < 1 - comparison.difference.confidence
    if significant and comparison.difference.value > 0:
        return "reproduced", f"Significantly worse.{note}", evidence
    if significant:
        return "not reproduced", f"Significantly better.{note}", evidence
    if comparison.verdict == "equivalent":
        return "not reproduced", f"No worse than within the margin.{note}", evidence
    return "not tested here", f"Inconclusive: these seeds and steps do not tell.{note}", evidence


def judged_unchanged(comparison: statistics.Comparison) -> tuple[Word, str, str]:
    """Word, why and evidence for the claim that nothing changes: an equivalence test."""
    evidence = comparison.text()
    if comparison.p_different is None:
        return "not tested here", "One seed gives no interval; a test takes two or more.", evidence
    if comparison.verdict == "equivalent":
        return "reproduced", "Two one-sided tests reject any difference as large as the margin.", evidence
    if comparison.verdict == "different":
        return "not reproduced", "Significantly different, and not within the margin.", evidence
    return "not tested here", "Inconclusive: neither a difference nor equivalence can be shown.", evidence
