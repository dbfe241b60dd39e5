"""What is said of each claim, from results whose answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from analysis.collect import Tables, collect
from analysis.statistics import compare
from optimus_cc.runs import DIVERGED, Status
from paper_figures.data import Data, read_claims
from paper_figures.tables import zero_shot
from paper_figures.verdicts import Verdict, judged_unchanged, judged_worse, verdicts
from tests.analysis.run_folders import write_run
from tests.paper_figures.conftest import SEEDS


@pytest.fixture(scope="module")
def judged(tables: Tables) -> dict[str, Verdict]:
    return {verdict.claim: verdict for verdict in verdicts(Data(tables))}


@pytest.mark.parametrize(
    ("claim", "word"),
    [
        ("cb_fe_perplexity", "reproduced"),  # 0.1 above 100
        ("cb_fe_sc_perplexity", "reproduced"),  # 1.2 % more
        ("motivation_quality", "reproduced"),
        ("lazy_error_helps", "reproduced"),
        ("epilogue_helps", "reproduced"),
        ("naive_cb_worst", "reproduced"),
        ("topk_worse", "not reproduced"),  # it is better there
        ("forward_diverges", "not tested here"),  # no such run
        ("fe_volume", "reproduced"),
        ("fe_measured", "not tested here"),
        ("codec_throughput", "not tested here"),  # on a CPU
        ("memory_workspace", "not tested here"),  # the model is none of the paper's
        ("memory_lazy_error", "not tested here"),
        ("error_independence", "reproduced"),
        ("zero_shot", "not tested here"),
    ],
)
def test_known_answers(claim: str, word: str, judged: dict[str, Verdict]) -> None:
    verdict = judged[claim]
    assert verdict.word == word, verdict
    if word != "not tested here":
        assert verdict.evidence
        assert verdict.scale
        assert verdict.runs or claim == "fe_volume"


def test_memory_is_judged_on_models_of_the_paper(tmp_path: Path) -> None:
    for technique in ("baseline", "cb"):
        write_run(tmp_path, f"technique={technique} parallel=pp4_dp2 model=gpt_335m", probes=True)
    judged = {verdict.claim: verdict for verdict in verdicts(Data(collect([tmp_path]).tables))}
    assert judged["memory_workspace"].word == "reproduced"  # 6 % of 5 to 10
    assert judged["memory_lazy_error"].word == "reproduced"  # 1 %
    assert "6.00 %" in judged["memory_workspace"].evidence


def test_every_claim_has_one(judged: dict[str, Verdict]) -> None:
    assert list(judged) == [claim["id"] for claim in read_claims()["claims"]]


def test_runs_are_evidence(judged: dict[str, Verdict]) -> None:
    techniques = {run.split("-")[2] for run in judged["topk_worse"].runs}
    assert techniques == {"cb", "cb_topk"}
    assert len(judged["topk_worse"].runs) == 6
    assert "3 seeds" in judged["topk_worse"].scale


def test_one_seed_tests_nothing(tmp_path: Path) -> None:
    for line, perplexity in (("+ablation=baseline", 100.0), ("+ablation=naive_dp", 900.0), ("+ablation=cb_fe", 100.0)):
        write_run(tmp_path, f"{line} parallel=pp4_dp2", perplexity=perplexity)
    judged = {verdict.claim: verdict for verdict in verdicts(Data(collect([tmp_path]).tables))}
    for claim in ("motivation_quality", "cb_fe_perplexity"):
        assert judged[claim].word == "not tested here"
        assert "One seed" in judged[claim].why


def test_without_runs_each_says_how_to_make_them(tmp_path: Path) -> None:
    for verdict in verdicts(Data(collect([tmp_path]).tables)):
        if verdict.word == "not tested here" and verdict.claim not in ("fe_measured", "motivation_time"):
            assert "python run.py" in verdict.why, verdict


def test_a_run_whose_configuration_is_lost_is_not_used(tmp_path: Path) -> None:
    for seed in (1, 2):
        kept = write_run(tmp_path, "technique=baseline parallel=pp4_dp2", seed)
    kept.config_path.write_text("a: [1")
    data = Data(collect([tmp_path]).tables)
    assert list(data.runs["seed"]) == [1]
    verdicts(data)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_diverges_is_worse_and_is_not_left_out(tmp_path: Path, stopped: bool) -> None:
    """With one of three seeds infinite, or ended for it; the two that are left are equivalent to the baseline."""
    for line in ("baseline", "cb", "cb_fe", "cb_no_lazy_error", "cb_no_epilogue", "cb_naive", "naive_dp"):
        good = line in ("baseline", "cb", "cb_no_lazy_error", "cb_no_epilogue")
        for seed in SEEDS:
            value = 100.0 + seed if good or seed != 2 else math.inf
            folder = write_run(tmp_path, f"+ablation={line} parallel=pp4_dp2", seed, perplexity=value)
            if stopped and value == math.inf:
                folder.summary_path.unlink()
                folder.write_status(
                    Status(
                        "failed",
                        total_steps=40,
                        device="cpu",
                        cause=f"rank 3: NonFiniteLoss: {DIVERGED} nan by step 20",
                    )
                )
    data = Data(collect([tmp_path]).tables)
    judged = {verdict.claim: verdict for verdict in verdicts(data)}
    assert "Diverged, and in no curve: cb_fe, seed 2." in data.notes["claim cb_fe_perplexity"]
    expected = {
        "motivation_quality": "reproduced",
        "naive_cb_worst": "reproduced",
        "cb_fe_perplexity": "not reproduced",
        "lazy_error_helps": "not reproduced",
    }
    assert {claim: judged[claim].word for claim in expected} == expected
    assert "diverged in 1 of 3 seeds (2)" in judged["cb_fe_perplexity"].evidence


BASELINE = {1: 100.0, 2: 101.0, 3: 99.0}


@pytest.mark.parametrize(
    ("shift", "worse", "unchanged"),
    [
        ((5.0, 5.1, 4.9), "reproduced", "not reproduced"),
        ((-5.0, -5.1, -4.9), "not reproduced", "not reproduced"),
        ((0.1, -0.1, 0.0), "not reproduced", "reproduced"),
        ((0.5, 0.51, 0.49), "reproduced", "reproduced"),  # worse, within the margin
        ((5.0, -4.0, 1.0), "not tested here", "not tested here"),
    ],
)
def test_words(shift: tuple[float, ...], worse: str, unchanged: str) -> None:
    other = {seed: BASELINE[seed] + one for seed, one in zip(BASELINE, shift, strict=True)}
    comparison = compare(BASELINE, other)
    assert judged_worse(comparison)[0] == worse
    assert judged_unchanged(comparison)[0] == unchanged


def test_zero_shot_takes_the_newest_checkpoint_and_says_that_small_models_show_nothing(tmp_path: Path) -> None:
    for technique, accuracy in (("baseline", 0.25), ("cb_fe", 0.26)):
        folder = write_run(tmp_path, f"technique={technique} parallel=pp4_dp2")
        folder.evaluation.mkdir()
        for step, value in ((20, 0.9), (40, accuracy)):
            measure = {"metrics": {"acc": {"value": value, "standard_error": 0.01}}, "items": {"evaluated": 50}}
            result = {"kind": "zero_shot", "checkpoint": {"step": step}, "tasks": {"piqa": measure}}
            (folder.evaluation / f"step_{step:08d}-zero_shot-0.json").write_text(json.dumps(result))
    data = Data(collect([tmp_path]).tables)
    frame = zero_shot.values(data)
    assert dict(zip(frame["technique"], frame["accuracy_percent"], strict=True)) == {"baseline": 25.0, "cb_fe": 26.0}
    (verdict,) = [one for one in verdicts(data) if one.claim == "zero_shot"]
    assert verdict.word == "not tested here"
    assert "+1.00 points" in verdict.evidence
    evaluation = data.tables["evaluation"]
    alone = {**data.tables, "evaluation": evaluation[evaluation["run"].str.contains("baseline")]}
    (verdict,) = [one for one in verdicts(Data(alone)) if one.claim == "zero_shot"]
    assert not verdict.evidence, "nothing to compare with is no unchanged accuracy"
    assert "both baseline and cb_fe" in verdict.why
