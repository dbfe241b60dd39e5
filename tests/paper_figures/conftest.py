"""A study of made-up results, and the report made from it once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.collect import Tables, collect
from optimus_cc.runs import RunFolder, Status
from paper_figures.__main__ import main
from tests.analysis.run_folders import write_run

SEEDS = (1, 2, 3)
LAYOUT = "parallel=pp4_dp2"
WORSE = {
    "+ablation=baseline": 0.0,
    "+ablation=cb": 0.1,
    "+ablation=cb_fe": 0.1,
    "+ablation=cb_fe_sc": 1.2,
    "+ablation=cb_no_lazy_error": 6.0,
    "+ablation=cb_no_epilogue": 6.0,
    "+ablation=cb_naive": 20.0,
    "+ablation=cb_topk": -6.0,
    "+ablation=naive_dp": 15.0,
}
"""By how much each technique's perplexity is above the baseline's 100; top-k's is below, against the paper."""


def write_study(runs: Path) -> None:
    for line, difference in WORSE.items():
        for seed in SEEDS:
            fused = "fe" in line
            write_run(
                runs,
                f"{line} {LAYOUT}",
                seed,
                perplexity=100 + seed + difference + 0.01 * (-1) ** seed,
                step_time_s=0.5 - difference / 1000,
                # D = 2: a ring over the replicas within the gradients', one over two ranks; fused 1.5 in place of 2.
                wire={"embedding": 6e6 if fused else 4e6, "data_parallel": 10e6 if fused else 14e6},
                probes=True,
            )
    for rank in (2, 4):
        write_run(
            runs, f"+ablation=cb_fe_sc {LAYOUT} technique.sc.codec.rank={rank}", wire={"data_parallel": rank * 1e6}
        )
    for fraction in (25, 50):
        write_run(runs, f"+ablation=sc_fraction_{fraction} {LAYOUT}", wire={"data_parallel": 9e6 - fraction * 1e5})
    larger = "parallel=pp4_dp2 model=gpt_mini"
    for line in ("parallel=pp2_dp4", larger, f"{larger} parallel.data_parallel_size=4"):
        for technique in ("baseline", "cb_fe_sc"):
            write_run(runs, f"technique={technique} {line}", step_time_s=0.6 if technique == "baseline" else 0.5)
    folder = RunFolder(runs / "benchmarks" / "codecs-single-2024")
    folder.path.mkdir(parents=True)
    folder.config_path.write_text("model: {name: gpt_tiny}\n")
    folder.write_status(Status("finished", device="cpu"))
    case = {"codec": "low_rank", "rank": 4, "rows": 256, "columns": 128, "logical_bytes": 131072}
    speed = {"copy_gbyte_s": 9.0, "encode_gbyte_s": 2.0, "decode_gbyte_s": 2.0}
    folder.write_summary(
        {"benchmark": "codecs", "codecs": [{**case, **speed}, {**case, **speed, "logical_bytes": 1e6}]}
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "runs"
    write_study(folder)
    return folder


@pytest.fixture(scope="session")
def tables(runs: Path) -> Tables:
    return collect([runs]).tables


@pytest.fixture(scope="session")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``make figures`` makes of the study."""
    folder = tmp_path_factory.mktemp("made") / "report"
    assert main(["--runs", str(runs), "--output", str(folder)]) == 0
    return folder
