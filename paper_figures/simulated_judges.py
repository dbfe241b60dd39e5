"""What decides each claim of ``claims.yaml`` that the simulator can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from paper_figures import predicted
from paper_figures.data import Data
from paper_figures.item import Missing
from paper_figures.verdicts import Verdict, Word, judge

Claim = Mapping[str, Any]
NEAR_POINTS = 2.0
"""Percentage points within which a predicted gain counts as the paper's."""
PAPERS_SIZE = "the paper's: 128 A100 and more, simulated"


@judge("cb_fe_speedup", "cb_fe_sc_speedup", "motivation_time")
def speedup(data: Data, claim: Claim) -> Verdict:
    """By the bandwidths that links were seen to give, unless those were fitted to this very claim."""
    technique = {"cb_fe_speedup": "cb_fe", "cb_fe_sc_speedup": "cb_fe_sc", "motivation_time": "naive_dp"}[claim["id"]]
    need = predicted.MOTIVATION if technique == "naive_dp" else predicted.PRETRAINING
    configs = [config for config, _ in data.predict(need)]
    source = next((one.cluster.calibration.source for one in configs if one.cluster.calibration is not None), "")
    gains = {
        bandwidth: {
            config.model.name: percent
            for config, percent in predicted.faster(data, need, lambda config: config.model.name, bandwidth, "days")
            if config.technique.label == technique and (technique != "cb_fe_sc" or config.model.name == "gpt_8_3b")
        }
        for bandwidth in (predicted.EFFECTIVE, predicted.LINE_RATE)
    }
    evidence = "; ".join(
        f"{bandwidth.replace('_', ' ')} bandwidth: "
        + ", ".join(f"{percent:.1f} % ({model})" for model, percent in found.items())
        for bandwidth, found in gains.items()
    )
    told = f" Bandwidths were fitted to: {source}." if source else " No bandwidth was measured: both are line rates."
    if source and claim.get("used_to_calibrate"):
        return Verdict("not tested here", f"The simulator was fitted to this claim.{told}", evidence, PAPERS_SIZE)
    stated = claim["percent"]
    low, high = (min(stated), max(stated)) if isinstance(stated, list) else (stated, stated)
    near = all(low - NEAR_POINTS <= one <= high + NEAR_POINTS for one in gains[predicted.EFFECTIVE].values())
    why = f"Within {NEAR_POINTS:g} points." if near else f"Not within {NEAR_POINTS:g} points."
    return Verdict("reproduced" if near else "not reproduced", why + told, evidence, PAPERS_SIZE)


@judge("epilogue_same_speed")
def same_speed(data: Data, claim: Claim) -> Verdict:
    frame = pd.DataFrame(predicted.network_gains(data))
    fast = frame[(frame["kind"] == "predicted") & (frame["gbit_s"] >= claim["above_gbit_s"])]
    wide = fast.pivot_table(index="gbit_s", columns="technique", values="value")
    gaps = wide["cb_no_epilogue"] - wide["cb"]
    evidence = "; ".join(f"{rate:g} Gb/s: {gap:+.1f} points" for rate, gap in gaps.items())
    word: Word = "reproduced" if gaps.abs().max() <= NEAR_POINTS else "not reproduced"
    why = f"Every backward message against the epilogue's alone, GPT-8.3B; the same is within {NEAR_POINTS:g} points."
    return Verdict(word, why, evidence, PAPERS_SIZE)


@judge("scale_175b")
def scales(data: Data, claim: Claim) -> Verdict:
    frame = pd.DataFrame(predicted.predicted_gains(data, predicted.SCALING))
    gains = frame.groupby(["ranks", "model"])["value"].mean().unstack("model")
    if "gpt_175b" not in gains:
        raise Missing("predictions of gpt_175b", predicted.SCALING.command)
    large, small = gains["gpt_175b"], gains["gpt_8_3b"]
    evidence = "; ".join(f"{ranks} GPUs: 175B {large[ranks]:.1f} %, 8.3B {small[ranks]:.1f} %" for ranks in gains.index)
    word: Word = "reproduced" if (large >= small / 2).all() and (large > 1).all() else "not reproduced"
    why = (
        "The gain holds if it is above 1 % and at least half of GPT-8.3B's on as many GPUs; 175B does not fit on 80 GB."
    )
    return Verdict(word, why, evidence, PAPERS_SIZE)
