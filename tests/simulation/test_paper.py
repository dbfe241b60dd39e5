"""The paper's cluster is fitted to three step times that are none of Optimus-CC's; the rest is predicted."""

from __future__ import annotations

import pytest

from optimus_cc.simulation import predict
from optimus_cc.simulation.paper import FITTED, LAYOUT, calibrate_paper, compare
from tests.config.command_line import one


def configs() -> dict[tuple[str, str], object]:
    return {
        (model, technique): one(f"model={model} technique={technique} task=simulate {LAYOUT}")
        for model in ("gpt_2_5b", "gpt_8_3b")
        for technique in ("baseline", "naive_dp", "cb_fe", "cb_fe_sc")
    }


def test_no_speed_up_of_optimus_cc_is_fitted() -> None:
    assert {stated.technique for stated in FITTED} == {"baseline", "naive_dp"}
    assert len(FITTED) == 3


def test_the_shipped_cluster_is_what_the_fit_gives() -> None:
    found = configs()
    shipped = found["gpt_8_3b", "baseline"].cluster  # type: ignore[attr-defined]
    fitted = calibrate_paper(found, shipped)  # type: ignore[arg-type]
    assert fitted.inter_node.ring_gbit_s == pytest.approx(shipped.inter_node.ring_gbit_s, rel=0.02)
    assert fitted.inter_node.p2p_gbit_s == pytest.approx(shipped.inter_node.p2p_gbit_s, rel=0.1)
    assert fitted.device.efficiency.matmul_fp32 == pytest.approx(shipped.device.efficiency.matmul_fp32, rel=0.02)
    for stated in FITTED:
        config = found[stated.model, stated.technique]
        assert predict(config).step_time_s == pytest.approx(stated.step_time_s, rel=0.01)  # type: ignore[arg-type]


def test_both_bandwidths_stand_side_by_side() -> None:
    rows = {(row["model"], row["technique"]): row for row in compare(configs(), {("gpt_8_3b", "cb_fe_sc"): 25.72})}  # type: ignore[arg-type]
    row = rows["gpt_8_3b", "cb_fe_sc"]
    assert not row["fitted"]
    assert row["error_percent"] == pytest.approx(100 * (row["days"] / 25.72 - 1))
    # What a network gives that is slower than it could be makes compression worth more.
    assert row["speedup_percent"] > row["line_rate_speedup_percent"] > 0
    assert rows["gpt_8_3b", "baseline"]["line_rate_days"] < rows["gpt_8_3b", "baseline"]["days"]
