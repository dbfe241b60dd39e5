"""``show``, ``compare`` and ``push`` on the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.collect import collect
from analysis.compare import compare
from optimus_cc.config.compose import CONF
from tests.analysis.run_folders import write_run

CB = "technique=cb parallel=pp4_dp2"
BASELINE = "technique=baseline parallel=pp4_dp2"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two techniques over three seeds; CB is worse by 5, sends a tenth of a class, and is as fast."""
    monkeypatch.chdir(tmp_path)
    for seed, perplexity in ((1, 100.0), (2, 110.0), (3, 120.0)):
        write_run(Path("runs"), BASELINE, seed, perplexity=perplexity, step_time_s=0.5 + seed / 1000)
        write_run(
            Path("runs"),
            CB,
            seed,
            perplexity=perplexity + 5 + seed / 10,
            step_time_s=0.5 + seed / 1000 + 1e-5 * (-1) ** seed,
            wire={"pipeline_backward": 1e5},
        )
    return Path("runs")


def test_compare_tells_each_quantity_with_its_verdict(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pair,) = compare(collect([runs]).tables, "baseline", "cb")
    perplexity = pair.comparisons["validation_token_perplexity"]
    assert (perplexity.verdict, perplexity.difference.n) == ("different", 3)
    assert perplexity.difference.value == pytest.approx(5.2)
    assert pair.comparisons["step_time_median_s"].verdict == "equivalent"
    assert pair.comparisons["wire_bytes_per_step"].difference.value == pytest.approx(-0.9e6)
    assert main(["compare", "baseline", "cb"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("gpt_tiny, pp4_dp2, 40 steps, cpu: cb against baseline\n")
    assert re.search(
        r"perplexity \(per token\) +110.000 -> 115.200\n +different: \+5.200 ± 0.248 \(\+4.7 %\), n = 3", output
    )
    assert main(["compare", "baseline", "cb", "--margin", "0.06"]) == 0
    assert "equivalent: +5.200" in capsys.readouterr().out


def test_settings_are_not_mixed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs, f"{BASELINE} training.global_batch_size=32", 1, perplexity=50)
    write_run(runs, f"{CB} training.global_batch_size=32", 1, perplexity=49)
    write_run(runs, f"{CB} training.global_batch_size=64", 1, perplexity=1)
    pairs = compare(collect([runs]).tables, "baseline", "cb")
    assert sorted(pair.comparisons["validation_token_perplexity"].difference.n for pair in pairs) == [1, 3]
    main(["compare", "baseline", "cb"])
    assert "1 pair of seeds, no interval" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "baseline", "sc"], "no finished run is of the technique sc"),
        (["compare", "baseline", "s1"], "names 2 variants"),
        (["compare", "baseline", "*-cb-s9-*"], "no finished run"),
        (["show", "nothing"], "no rows in the table runs of runs that match nothing"),
        (["show", "--columns", "run,sead"], "no column sead; did you mean seed"),
        (["show", "--runs", "nowhere"], "nowhere: No such file"),
        (["push", "nothing"], "no finished run to send"),
        (["push", "--report", "."], "holds no figures"),
    ],
)
def test_what_is_not_there(arguments: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert said in capsys.readouterr().err


def test_show(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "cb", "--columns", "seed,validation_token_perplexity", "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed,validation_token_perplexity"
    assert sorted(float(line.split(",")[1]) for line in lines[1:]) == pytest.approx([105.1, 115.2, 125.3])
    assert main(["show", "--table", "traffic", "baseline"]) == 0
    assert capsys.readouterr().out.count("pipeline_backward") == 3
    assert main(["collect", "-o", "results.parquet"]) == 0
    capsys.readouterr()
    assert main(["show", "*-s2-*", "--from", "results.parquet"]) == 0
    assert capsys.readouterr().out.count("finished") == 2


def test_push_offline(runs: Path) -> None:
    """All that is sent is in the file that is uploaded later, once the process has ended."""
    pytest.importorskip("wandb")
    command = [sys.executable, "-m", "analysis", "push", "*-cb-s1-*", "--dir", "sent"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(CONF.parent)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "to upload  wandb sync sent/wandb/offline-run-*"
    (folder,) = Path("sent/wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    content = file.read_bytes()
    for part in (b"validation/perplexity", b"train/loss", b"step_time_s/median"):
        assert part in content
