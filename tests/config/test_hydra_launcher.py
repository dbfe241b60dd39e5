"""Sweeps through Hydra: which runs reach the engine, and what Hydra's sweepers get back."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins

import run
from launchers import sweep
from launchers.plan import plan
from launchers.sweep import Outcome
from optimus_cc import tasks
from optimus_cc.config import ConfigError, RunConfig
from optimus_cc.config.compose import SCRATCH
from optimus_cc.runs import RunCancelled, RunFailed
from tests.config.command_line import composed

ROOT = Path(run.__file__).parent
batches: list[list[RunConfig]] = []


def engine(configs: Sequence[RunConfig]) -> list[Outcome]:
    """Stands in for the engine; the seed says how a run ends."""
    batches.append(list(configs))
    ends = {1: RunFailed("rank 3 failed"), 2: RunCancelled("cancelled by Ctrl-C")}
    stopped = any(config.training.seed == 2 for config in configs)
    return [Outcome(planned, ends.get(planned.config.training.seed), interrupted=stopped) for planned in plan(configs)]


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "run_all", engine)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    try:
        return run.main()
    except SystemExit as end:
        return int(str(end.code))


def seeds() -> list[list[int]]:
    return [[config.training.seed for config in batch] for batch in batches]


def test_a_sweep_is_one_batch_of_checked_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(monkeypatch, "-m", "+ablation=baseline,cb", "training.seed=7,8") == 0
    assert [[(config.ablation, config.training.seed) for config in batch] for batch in batches] == [
        [("baseline", 7), ("baseline", 8), ("cb", 7), ("cb", 8)]
    ]
    assert list(tmp_path.iterdir()) == []
    assert not SCRATCH.exists()


def test_nothing_of_a_wrong_sweep_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(monkeypatch, "-m", "training.seed=7,-1") == 2
    assert batches == []
    assert list(tmp_path.iterdir()) == []


def test_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "-m", "training.seed=1,7") == 1
    batched = "hydra.sweeper.max_batch_size=1"
    assert main(monkeypatch, "-m", "training.seed=2,7", batched) == 130
    assert seeds() == [[1, 7], [2]]  # of a stopped sweep no other batch starts


def recipe(tmp_path: Path, params: str) -> tuple[str, str, str]:
    """An option that asks for a sweep itself."""
    file = tmp_path / "conf" / "experiment" / "recipe.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\nhydra: {{mode: MULTIRUN, sweeper: {{params: {{{params}}}}}}}\n")
    return "--config-dir", str(tmp_path / "conf"), "experiment=recipe"


def test_a_configuration_may_ask_for_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(monkeypatch, *recipe(tmp_path, 'training.seed: "3,4"'), "training.log_interval=2") == 0
    assert seeds() == [[3, 4]]
    assert {config.training.log_interval for config in batches[0]} == {2}


def test_sweeping_over_the_launcher_is_refused(tmp_path: Path) -> None:
    for line in ("-m launcher=local,local", " ".join(recipe(tmp_path, 'launcher: "local,local"'))):
        with pytest.raises(ConfigError, match="one launcher for all runs"):
            composed(line)
    assert composed("-m launcher=local")


def test_the_launcher_may_be_chosen_by_its_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one that submits to a cluster will: it overrides Hydra's and asks for a sweep."""
    option = tmp_path / "conf" / "launcher" / "other.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: basic\n"
        "launcher: {name: local}\nhydra: {mode: MULTIRUN}\n"
    )
    done: list[int] = []
    monkeypatch.setattr(tasks, "resolve", lambda name: lambda config: done.append(config.training.seed))
    assert main(monkeypatch, "--config-dir", str(tmp_path / "conf"), "launcher=other", "training.seed=7,8") == 0
    assert (done, batches) == ([7, 8], [])


def test_other_tasks_run_here_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "-m", "task=exposure", "+ablation=baseline,cb") == 0
    assert batches == []
    assert capsys.readouterr().out.count("pipeline_backward") >= 2


def test_hydras_own_sweep_folder_for_who_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = ("hydra.sweep.dir=mine", "hydra.sweep.subdir=${hydra.job.num}", "hydra.output_subdir=.hydra")
    assert main(monkeypatch, "-m", "training.seed=7,8", *mine) == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"0", "1", "multirun.yaml"}
    assert "training.seed=8" in (tmp_path / "mine" / "1" / ".hydra" / "overrides.yaml").read_text()


def test_the_plugin_is_found_and_light() -> None:
    code = (
        "import sys; from hydra.core.plugins import Plugins; from hydra.plugins.launcher import Launcher\n"
        "names = [one.__module__ for one in Plugins.instance().discover(Launcher)]\n"
        "assert 'hydra_plugins.optimus_cc_launcher' in names, names\n"
        "heavy = {'torch', 'pydantic', 'numpy', 'launchers', 'optimus_cc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
    assert any(one.__module__ == "hydra_plugins.optimus_cc_launcher" for one in Plugins.instance().discover())


_SWEEPER = """
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
import json

class Halving(Sweeper):
    '''Tries two learning rates, then half the better one and a broken seed.'''

    def __init__(self, last):
        self.last = last

    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments):
        others = [one for one in arguments if "interval" not in one]
        first = self.launcher.launch([[*others, f"training.seed={seed}"] for seed in (30, 20)], 0)
        values = [one.return_value for one in first]
        best = min(values)
        proposed = int(best) // 2, self.last
        second = self.launcher.launch([[*others, f"training.seed={seed}"] for seed in proposed], 2)
        values += [second[0].return_value]
        try:
            second[1].return_value
        except Exception as error:
            values.append(f"{type(error).__name__}: {error}")
        ids = [one.hydra_cfg.hydra.job.num for one in (*first, *second)]
        said = [list(one.overrides) for one in second]
        print("RESULT " + json.dumps([values, ids, said, [str(one.status) for one in second]]))

ConfigStore.instance().store(
    group="hydra/sweeper", name="halving",
    node={"_target_": "hydra_plugins.halving.Halving", "last": 1}, provider="test")
"""
_DRIVER = """
import sys
import run
from launchers import sweep
from launchers.plan import plan
from optimus_cc.runs import RunFailed

def engine(configs):
    print("BATCH", [config.training.seed for config in configs])
    outcomes = []
    for planned in plan(configs):
        seed = planned.config.training.seed
        planned.folder.path.mkdir(parents=True)
        planned.folder.write_summary({"validation": {"loss": float(seed)}})
        outcomes.append(sweep.Outcome(planned, RunFailed("it broke") if seed == 1 else None))
    return outcomes

sweep.run_all = engine
sys.argv = ["run.py", *sys.argv[1:]]
sys.exit(run.main())
"""


def with_another_sweeper(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    plugin = tmp_path / "plugins" / "hydra_plugins" / "halving.py"
    plugin.parent.mkdir(parents=True, exist_ok=True)
    plugin.write_text(textwrap.dedent(_SWEEPER))
    path = os.pathsep.join((str(plugin.parents[1]), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-c", _DRIVER, "-m", "hydra/sweeper=halving", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_another_sweeper_gets_losses_and_proposes_more(tmp_path: Path) -> None:
    result = with_another_sweeper(tmp_path, "optimizer.learning_rate=interval(1e-4,1e-2)", "parallel=pp2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BATCH [30, 20]\nBATCH [10, 1]\n" in result.stdout
    values, ids, said, status = json.loads(result.stdout.partition("RESULT ")[2])
    assert values == [30.0, 20.0, 10.0, "RunFailed: it broke"]
    assert ids == [0, 1, 2, 3]
    assert said[0] == ["parallel=pp2", "training.seed=10"]
    assert status == ["JobStatus.COMPLETED", "JobStatus.FAILED"]


def test_a_batch_of_another_sweeper_is_checked_before_it_starts(tmp_path: Path) -> None:
    result = with_another_sweeper(tmp_path, "hydra.sweeper.last=-5")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "BATCH [30, 20]" in result.stdout
    assert result.stdout.count("BATCH") == 1
    assert "ConfigError in training.seed=-5" in result.stderr
    assert "Traceback" not in result.stderr


def test_keys_of_another_sweeper_are_checked_before_anything_starts(tmp_path: Path) -> None:
    result = with_another_sweeper(tmp_path, "optimizer.learning_rte=interval(1e-4,1e-2)")
    assert (result.returncode, result.stdout) == (2, "")
    assert "learning_rte" in result.stderr


def test_a_summary_without_a_loss_is_no_number(tmp_path: Path) -> None:
    (planned,) = plan(composed(f"runs_dir={tmp_path}"))
    assert math.isnan(Outcome(planned).value())
    values: list[Any] = [{"validation": {"loss": 1.5}}, {"validation": None}, {"validation": {"loss": "x"}}]
    planned.folder.path.mkdir()
    for summary, expected in zip(values, (1.5, math.nan, math.nan), strict=True):
        planned.folder.write_summary(summary)
        assert repr(Outcome(planned).value()) == repr(expected)


def test_sweeps_may_refer_to_what_hydra_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = "runs_dir=${hydra:runtime.cwd}/point_${hydra:job.num}"
    assert [config.runs_dir for config in composed(f"-m training.seed=7,8 '{places}'")] == [
        f"{tmp_path}/point_{number}" for number in (0, 1)
    ]
    assert main(monkeypatch, "-m", "training.seed=7,8", places) == 0
    assert [config.runs_dir for config in batches[0]] == [f"{tmp_path}/point_{number}" for number in (0, 1)]


def test_another_program_is_told_that_the_launcher_is_not_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "@hydra.main(version_base='1.3', config_path='.', config_name='config')\n"
        "def main(config): print('steps', config.steps)\n"
        "main()\n"
    )
    command = [sys.executable, "app.py", "-m", "hydra.sweep.dir=sweep", "steps=1,2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "0"}
    for launcher, code, said in (("basic", 0, "steps 2"), ("optimus_cc", 1, "serves run.py of Optimus-CC alone")):
        result = subprocess.run(
            [*command, f"hydra/launcher={launcher}"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (result.returncode, said in result.stdout + result.stderr) == (code, True), result.stderr
        assert "Traceback" not in result.stderr
