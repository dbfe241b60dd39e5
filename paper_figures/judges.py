"""What decides each claim of ``claims.yaml`` that trainings, measurements or arithmetic can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis import statistics
from paper_figures.data import Data, Selection
from paper_figures.figures import error_independence, memory, stage_fraction_rank
from paper_figures.item import Missing, Query
from paper_figures.tables import fe_volume, zero_shot
from paper_figures.verdicts import (
    DIVERGED,
    Verdict,
    Word,
    compared,
    judge,
    judged_unchanged,
    judged_worse,
    measured,
    noted,
)

Claim = Mapping[str, Any]
STUDY = "laptop/reproduce"


@judge("cb_fe_perplexity")
def unchanged(data: Data, claim: Claim) -> Verdict:
    query = Query(STUDY, ("baseline", "cb_fe"))
    return compared(data, query, "cb_fe", "not reproduced", lambda _, comparison: judged_unchanged(comparison))


@judge("cb_fe_sc_perplexity")
def slightly_worse(data: Data, claim: Claim) -> Verdict:
    """Worse, and by no more than the paper's per cent, as far as the interval tells."""

    def judged(_: Selection, comparison: statistics.Comparison) -> tuple[Word, str, str]:
        word, why, evidence = judged_worse(comparison)
        high = comparison.difference.high
        if word == "reproduced" and high is not None and 100 * high / comparison.baseline > 2 * claim["percent"]:
            word = "not reproduced"
            why = f"Worse, but the interval reaches beyond twice the paper's {claim['percent']} %."
        return word, why, evidence

    return compared(data, Query(STUDY, ("baseline", "cb_fe_sc")), "cb_fe_sc", "not reproduced", judged)


_WORSE = {
    "motivation_quality": ("naive_dp", "baseline"),
    "lazy_error_helps": ("cb_no_lazy_error", "cb"),
    "epilogue_helps": ("cb_no_epilogue", "cb"),
    "topk_worse": ("cb_topk", "cb"),
}


@judge(*_WORSE)
def one_worse_than_another(data: Data, claim: Claim) -> Verdict:
    technique, against = _WORSE[claim["id"]]
    query = Query(STUDY, (against, technique), baseline=against)
    return compared(data, query, technique, "reproduced", lambda _, comparison: judged_worse(comparison))


@judge("forward_diverges")
def forward(data: Data, claim: Claim) -> Verdict:
    """The study leaves it out: every such run of the paper's was lost."""

    def judged(selection: Selection, comparison: statistics.Comparison) -> tuple[Word, str, str]:
        note = "" if selection.diverged("cb_forward") else " No run diverged at this size."
        return judged_worse(comparison, note)

    query = Query(STUDY, ("baseline",), extra=("cb_forward",))
    return compared(data, query, "cb_forward", "reproduced", judged)


@judge("naive_cb_worst")
def naive_is_worst(data: Data, claim: Claim) -> Verdict:
    others = ("cb", "cb_no_lazy_error", "cb_no_epilogue")
    selection = data.select(Query(STUDY, ("cb_naive", *others), baseline="cb"))
    if "cb_naive" in selection.missing:
        raise Missing("runs of cb_naive", selection.query.command)
    gone = [said for name in others if (said := selection.only_diverged("cb_naive", name))]
    if len(gone) == len(others):
        return measured(selection, "reproduced", DIVERGED, "; ".join(gone), ("cb_naive", *others))
    comparisons = {
        name: found
        for name in others
        if (found := selection.compare("cb_naive", "validation_token_perplexity", against=name)) is not None
    }
    if len(comparisons) < len(others):
        raise Missing("runs of all variants of CB with the same seeds", selection.query.command)
    judged = {name: judged_worse(comparison) for name, comparison in comparisons.items()}
    words = {word for word, _, _ in judged.values()}
    word: Word = (
        "reproduced"
        if words == {"reproduced"}
        else "not reproduced"
        if "not reproduced" in words
        else "not tested here"
    )
    evidence = "; ".join(f"against {name}: {found.text()}" for name, found in comparisons.items())
    why = {
        "reproduced": "Significantly worse than each other variant."
        + " It did not diverge at this size." * (not selection.diverged("cb_naive")),
        "not reproduced": "Not worse than each other variant.",
        "not tested here": "Inconclusive against some variant: these seeds and steps do not tell.",
    }[word]
    return measured(selection, word, why, evidence, ("cb_naive", *others))


@judge("fe_volume")
def fe_arithmetic(data: Data, claim: Claim) -> Verdict:
    stated = data.paper["fused_embedding"]
    separate, fused = fe_volume.volumes(stated["at_data_parallel"])
    saved, ratio = float(100 * (1 - fused / separate)), float(separate / fused)
    right = round(saved, 1) == stated["traffic_saved_percent"] and round(ratio, 3) == stated["speed_ratio"]
    evidence = (
        f"{separate} V and {fused} V at D = {stated['at_data_parallel']}: {saved:.1f} % less, {ratio:.3f} times as fast"
    )
    runs: tuple[str, ...] = ()
    try:
        row = fe_volume.measured(data).iloc[0]
        counted = f"{row['separate_volumes']:.3f} V and {row['fused_volumes']:.3f} V"
        evidence += f"; counted in runs at D = {row['data_parallel_size']}: {counted}"
        exact = [float(volume) for volume in fe_volume.volumes(int(row["data_parallel_size"]))]
        right = right and all(
            abs(one - other) < 1e-6
            for one, other in zip(exact, row[["separate_volumes", "fused_volumes"]], strict=True)
        )
        runs = tuple(sorted(data.used.get(data.item, ())))
    except Missing:
        pass
    why = "Arithmetic of rings; a saving of 42.9 % would be wrong, for 1.429 is a ratio of speeds."
    return Verdict("reproduced" if right else "not reproduced", why, evidence, "any", runs)


@judge("fe_measured", "codec_throughput")
def needs_hardware(data: Data, claim: Claim) -> Verdict:
    if claim["id"] == "codec_throughput":
        codecs = data.tables["codecs"]
        on_gpu = codecs[(codecs["device"] == "cuda") & (codecs["codec"] == "low_rank")]
        if len(on_gpu):
            both = 8 / (1 / on_gpu["encode_gbyte_s"] + 1 / on_gpu["decode_gbyte_s"])
            word: Word = "reproduced" if both.max() >= claim["gbit_s"] else "not reproduced"
            why = "The fastest case measured on a GPU against the paper's number; the device is not the paper's."
            runs = tuple(sorted(on_gpu["benchmark"].unique()))
            return Verdict(word, why, f"{both.max():.0f} Gb/s", "GPU", runs)
        raise Missing("codec measurements on a GPU", "python run.py experiment=figure_codec_throughput")
    return Verdict(
        "not tested here",
        "It takes replicas on several nodes; on one machine an all-reduce goes through memory. The volume behind it is "
        "claim fe_volume.",
    )


@judge("memory_workspace", "memory_lazy_error")
def memory_share(data: Data, claim: Claim) -> Verdict:
    """A share of memory depends on the size of everything else, so a small model shows nothing of the paper's."""
    part = "workspaces" if claim["id"] == "memory_workspace" else "residuals"
    frame = memory.values(data)
    rows = frame[(frame["kind"] == "measured") & (frame["quantity"] == f"{part} over baseline")]
    shares = rows[rows["technique"] == "cb"]["value"]
    if shares.empty:
        raise Missing("runs of cb with the probe memory", memory.QUERY.command)
    percent = claim["percent"]
    low, high = percent if isinstance(percent, list) else (0.0, 2 * percent)
    evidence = f"{shares.min():.2f} to {shares.max():.2f} % over the stages of CB"
    models = set(data.runs.loc[data.runs["run"].isin(data.used[data.item]), "model"])
    if not models <= set(data.paper["models"]):
        why = "The share depends on the model's size, and no model of the paper was run with the probe."
        return noted(data, "not tested here", why, evidence)
    word: Word = "reproduced" if low <= shares.max() <= high else "not reproduced"
    return noted(data, word, f"Against {low:g} to {high:g} % at the stage where it is most.", evidence)


@judge("error_independence")
def independence(data: Data, claim: Claim) -> Verdict:
    frame = error_independence.values(data)
    rows = frame[(frame["kind"] == "measured") & (frame["quantity"] == error_independence.COSINE)]
    cosines = rows[rows["technique"] == "cb"]["value"].tolist() or rows["value"].tolist()
    overall = statistics.mean(cosines)
    largest = max(map(abs, cosines))
    word: Word = "reproduced" if largest < 0.1 else "not reproduced"
    evidence = f"Mean cosine similarity {overall.value:+.4f}; largest of any probed step {largest:.4f}"
    return noted(data, word, "Near zero is taken as below 0.1 at every probed step.", evidence)


@judge("stage_beats_rank")
def stage_or_rank(data: Data, claim: Claim) -> Verdict:
    points = pd.DataFrame(stage_fraction_rank.dials(data))
    dials = set(points.get("dial", ()))
    per_dial = points["dial"].value_counts() if len(dials) == 2 else pd.Series(dtype=int)
    command = f"python run.py experiment={stage_fraction_rank.RECIPE}"
    if len(per_dial) < 2 or per_dial.min() < 2:
        raise Missing("runs with several stage fractions and several ranks", command)
    # Where the dials' ranges of volume overlap: perplexity of each at the same volume, by straight lines.
    lines = {name: line.sort_values("sent_mb_per_step") for name, line in points.groupby("dial")}
    import numpy as np

    low = max(line["sent_mb_per_step"].min() for line in lines.values())
    high = min(line["sent_mb_per_step"].max() for line in lines.values())
    at = np.linspace(low, high, 11)
    curves = {name: np.interp(at, line["sent_mb_per_step"], line["value"]) for name, line in lines.items()}
    gap = float((curves[stage_fraction_rank.RANK] - curves[stage_fraction_rank.FRACTION]).mean())
    noise = float(((points["high"] - points["low"]) / 2).mean())
    evidence = (
        f"At equal volume the rank's perplexity is {gap:+.2f} against the fraction's; intervals are ± {noise:.2f}"
    )
    if not noise or abs(gap) <= noise:
        return noted(data, "not tested here", "Inconclusive: the gap is within the seeds' intervals.", evidence)
    return noted(data, "reproduced" if gap > 0 else "not reproduced", "By mean perplexity at equal volume.", evidence)


@judge("zero_shot")
def zero_shot_accuracy(data: Data, claim: Claim) -> Verdict:
    frame = zero_shot.values(data)
    tasks = frame["task"].nunique()
    wide = frame.pivot_table(index="task", columns="technique", values="accuracy_percent")
    if not {"baseline", "cb_fe"} <= set(wide):
        raise Missing("zero-shot results of both baseline and cb_fe", zero_shot.COMMAND)
    change = (wide["cb_fe"] - wide["baseline"]).mean()
    evidence = f"Mean change of accuracy over {tasks} tasks with CB+FE: {change:+.2f} points"
    why = "Models of this size score near chance, so that unchanged accuracy says nothing."
    return noted(data, "not tested here", why, evidence)
