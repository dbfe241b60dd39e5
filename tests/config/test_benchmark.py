"""``benchmark``: what is measured where."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimus_cc.config import ConfigError
from optimus_cc.config.benchmark import CostConfig, LinksConfig, measured_techniques
from tests.config.command_line import one

EVERY = ["cb", "cb_no_epilogue", "cb_topk", "fe", "sc", "cb_fe_sc"]


def test_every_technique_is_the_one_of_its_name() -> None:
    benchmark = one("task=benchmark benchmark=cost").benchmark
    assert isinstance(benchmark, CostConfig)
    assert list(benchmark.techniques) == EVERY
    for name, technique in benchmark.techniques.items():
        assert technique.label == name
        assert technique.sc.warmup_steps == 0 or not technique.sc.enabled, "its warm-up would be measured"
    expected = one("technique=cb_fe_sc technique.sc.warmup_steps=0 parallel=pp4_dp2").technique
    assert benchmark.techniques["cb_fe_sc"] == expected


def test_what_a_layout_does_not_allow_is_left_out_and_told() -> None:
    assert list(measured_techniques(one("task=benchmark benchmark=cost parallel=pp4_dp2"))[0]) == EVERY
    config = one("task=benchmark benchmark=cost parallel=pp4")
    assert list(measured_techniques(config)[0]) == ["cb", "cb_no_epilogue", "cb_topk", "fe"]
    told = [notice for notice in config.notices() if notice.startswith("benchmark.techniques.")]
    assert [notice.split()[0].rpartition(".")[2] for notice in told] == ["sc", "cb_fe_sc"]


def test_the_list_is_taken_in_its_order() -> None:
    config = one("task=benchmark benchmark=cost benchmark.measure=[fe,cb] benchmark.techniques.cb.cb.codec.rank=2")
    techniques, _ = measured_techniques(config)
    assert list(techniques) == ["fe", "cb"]
    assert techniques["cb"].cb.codec == one("technique.cb.codec.rank=2").technique.cb.codec


def test_message_sizes() -> None:
    config = one("task=benchmark benchmark=links benchmark.min_bytes=10 benchmark.max_bytes=640 parallel=pp2")
    assert isinstance(config.benchmark, LinksConfig)
    assert config.benchmark.sizes_bytes == (8, 40, 160, 640)


def test_no_cluster_file_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="none is overwritten"):
        one(f"task=benchmark benchmark=links benchmark.cluster_file={file}")
    assert file.read_text() == "precious"
