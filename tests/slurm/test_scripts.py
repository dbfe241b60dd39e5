"""What SLURM is asked for, as text; needs no SLURM."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from launchers.plan import Planned
from launchers.slurm import after
from launchers.slurm.resources import Part, Resources, parts
from launchers.slurm.script import Place, after_script, array_script, srun_command
from optimus_cc.config import ConfigError, compose
from optimus_cc.config.launcher import ContainerConfig, SlurmConfig
from optimus_cc.runs import RunFolder
from tests.configurations import tiny
from tests.launchers.processes import ROOT, eventually

GOLDEN = Path(__file__).with_name("golden")
PLACE = Path("/shared/runs/.slurm/1a2b3c4d")
HERE = Place(Path("/shared/optimus-cc"), Path("/home/me/my work"), "/shared/venv/bin/python")
PLAIN = Resources(1, 4, False, SlurmConfig())
EVERYTHING = Resources(
    16,
    8,
    True,
    SlurmConfig(
        partition="gpu",
        account="me",
        qos="long",
        constraint="h100&ib",
        time_limit_h=24.0,
        cpus_per_rank=12,
        memory_per_node_gb=1000.5,
        exclusive=True,
        mail="me@example.org",
        modules=("cuda/12.8", "nccl"),
        setup=("export NCCL_SOCKET_IFNAME=ib0",),
        container=ContainerConfig(
            engine="pyxis", image="/images/pytorch.sqsh", mounts=("/shared:/shared", "/data:/data")
        ),
        sbatch=("--reservation=mine", "--contiguous"),
        srun=("--cpu-bind=none",),
    ),
)
SHORT = Resources(2, 2, False, SlurmConfig(time_limit_h=2 / 60, sbatch=("--no-requeue",)))


def in_layout(parallel: dict[str, int], ranks_per_node: int) -> Any:
    config: Any = tiny()
    cluster = replace(config.cluster, num_nodes=16, ranks_per_node=ranks_per_node)
    return replace(config, parallel=replace(config.parallel, **parallel), cluster=cluster)


def evaluated(name: str, parallel: dict[str, int], **evaluation: Any) -> Planned:
    """A run on nodes of eight."""
    config = in_layout(parallel, 8)
    settings = replace(config.evaluation, **evaluation)
    return Planned(replace(config, evaluation=settings), RunFolder(PLACE.parents[1] / name), "start")


TP8_PP4_DP4 = {"tensor_parallel_size": 8, "pipeline_parallel_size": 4, "data_parallel_size": 4}
EVALUATED = [
    evaluated("a", {"pipeline_parallel_size": 4, "data_parallel_size": 2}),
    evaluated("b's", TP8_PP4_DP4, data_dir="/data/zero shot", tasks=("piqa", "race"), limit=100),
]
EVALUATE = replace(EVERYTHING.launcher, after=("evaluate", "collect"))
SCRIPTS = {
    "plain": array_script(PLAIN, Part(1, None), PLACE / "array_1.runs", HERE),
    "everything": array_script(EVERYTHING, Part(12, 4), PLACE / "array_2.runs", HERE),
    "two_minutes": array_script(SHORT, Part(3, None), PLACE / "array_1.runs", HERE),
    "after": after_script(EVERYTHING, PLACE / "after.out", ["python -m analysis table /shared/runs a b"], HERE),
    "after_evaluate": after.script(PLACE, EVALUATED, EVALUATE, EVERYTHING, HERE)[1].replace(sys.executable, "python"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_golden_scripts(name: str) -> None:
    assert SCRIPTS[name] == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], check=True)


STUB = """#!/bin/bash
echo "python $*"
case "$*" in *--unbegun*) exit 75 ;; esac
echo $$ > pid
exec bash -c "$PROGRAM"
"""


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.parametrize(
    ("setup", "program", "unbegun", "code"),
    [
        ("ready; sleep 60", "", True, 75),  # modules
        ("", "touch ready; exec sleep 60", True, 75),  # imports
        ("", "trap 'exit 7' USR2 TERM; touch ready; while :; do sleep 0.02; done", False, 7),
        ("", "trap 'exit 143' USR2 TERM; touch ready; while :; do sleep 0.02; done", True, 75),
    ],
)
def test_a_signal_before_the_program_listens_puts_the_job_back(
    tmp_path: Path, number: signal.Signals, setup: str, program: str, unbegun: bool, code: int
) -> None:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    lines = ("ready() { echo $BASHPID > pid; touch ready; }", f"export PROGRAM={shlex.quote(program)}", setup)
    resources = replace(PLAIN, launcher=SlurmConfig(setup=tuple(filter(None, lines))))
    text = array_script(resources, Part(1, None), tmp_path / "array_1.runs", Place(ROOT, tmp_path, str(stub)))
    (tmp_path / "script").write_text(text)
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(["bash", "script"], stdout=output, cwd=tmp_path, start_new_session=True)
    try:
        eventually((tmp_path / "ready").exists, "it waits")
        job.send_signal(number)
        assert job.wait() == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # as SLURM ends what a job has left
    told = (tmp_path / "output").read_text().split()
    assert ("--unbegun" in told) == unbegun
    if unbegun:
        assert told[-1] == (tmp_path / "pid").read_text().strip()


@pytest.mark.parametrize(("setup", "program", "code"), [("false", "", 1), ("", "exit 0", 0), ("", "kill -9 $$", 137)])
def test_a_jobs_exit_code_is_its_programs(tmp_path: Path, setup: str, program: str, code: int) -> None:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    resources = replace(PLAIN, launcher=SlurmConfig(setup=(f"export PROGRAM={shlex.quote(program)}", setup or "true")))
    text = array_script(resources, Part(1, None), tmp_path / "array_1.runs", Place(ROOT, tmp_path, str(stub)))
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "--unbegun" not in done.stdout


def test_a_percent_sign_in_a_path_is_one(tmp_path: Path) -> None:
    text = array_script(PLAIN, Part(1, None), Path("/runs 50%j/array_1.runs"), HERE)
    assert "#SBATCH --output='/runs 50%%j/array_1_%a.out'\n" in text
    text = after_script(PLAIN, Path("/runs 50%j/after.out"), ["true"], HERE)
    assert "#SBATCH --output='/runs 50%%j/after.out'\n" in text


def test_srun() -> None:
    assert srun_command(SHORT, ["python", "-m", "x"]) == [
        *("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=2"),
        *("--kill-on-bad-exit=1", "--unbuffered", "python", "-m", "x"),
    ]
    everything = srun_command(EVERYTHING, ["python"])
    assert everything[4:6] == ["--cpus-per-task=96", "--gpus-per-node=8"]
    assert everything[-4:] == [
        *("--container-image=/images/pytorch.sqsh", "--container-mounts=/shared:/shared,/data:/data"),
        *("--cpu-bind=none", "python"),
    ]
    container = ContainerConfig(engine="apptainer", image="x.sif", mounts=("/a:/a",))
    assert srun_command(Resources(1, 8, True, SlurmConfig(container=container)), ["python"])[-7:] == [
        *("apptainer", "exec", "--nv", "--bind", "/a:/a", "x.sif", "python"),
    ]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.integers(1, 50), st.none() | st.integers(1, 60))
def test_arrays(sizes: list[int], largest: int, most: int | None) -> None:
    groups = parts(sizes, largest, most)
    assert [sum(part.size for part in group) for group in groups] == sizes
    flat = [part for group in groups for part in group]
    assert all(1 <= part.size <= largest for part in flat)
    if most is None:
        assert all(part.throttle is None and part.after is None for part in flat)
        return
    at_once: dict[int, list[int]] = {}  # of each chain of arrays, of which one runs at a time
    for index, part in enumerate(flat):
        chain = at_once[part.after] if part.after is not None else []
        chain.append(min(part.size, part.throttle or part.size))
        at_once[index] = chain
    chains = {id(chain): max(chain) for chain in at_once.values()}
    assert sum(chains.values()) <= most
    assert sum(chains.values()) == min(most, sum(sizes)) or any(part.throttle for part in flat)


@pytest.mark.parametrize(
    ("own", "most", "expected"),
    [
        ((1, 4, 2), 8, (1, 4, 2)),
        ((1, 4, 4), 8, (1, 4, 2)),
        ((8, 4, 4), 8, (8, 1, 1)),
        ((2, 8, 1), 8, (2, 4, 1)),
        ((8, 1, 1), 4, (4, 1, 1)),
        ((4, 6, 2), 16, (4, 3, 1)),
    ],
)
def test_a_layout_for_evaluation_fits_a_node(
    own: tuple[int, int, int], most: int, expected: tuple[int, int, int]
) -> None:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    layout = after.evaluated_layout(in_layout(dict(zip(names, own, strict=True)), most))
    assert tuple(getattr(layout, name) for name in names) == expected


def test_commands_of_evaluations_say_to_hydra_what_is_meant() -> None:
    (_, line, *_), parser = SCRIPTS["after_evaluate"].split("# command\n")[1].splitlines(), OverridesParser.create()
    words = shlex.split(line.removesuffix(" || failed=1"))
    said = {one.key_or_group: one.value() for one in parser.parse_overrides(words[2:])}
    assert said["run"] == str(PLACE.parents[1] / "b's")
    assert said["evaluation.data_dir"] == "/data/zero shot"
    assert said["evaluation.tasks"] == ["piqa", "race"]
    assert said["evaluation.limit"] == 100
    for text in ("null", "True", "a,b", "[x]", "${x}", "a\\", "'", "1", ".5", "ü ", "a=b", "x: y"):
        (one,) = parser.parse_overrides([f"key={after._quoted(text)}"])
        assert one.value() == text


def test_an_evaluation_by_a_job_is_looked_at_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launchers.slurm import commands, submit

    monkeypatch.setattr(commands, "is_installed", lambda: True)
    monkeypatch.setattr(commands, "sbatch", lambda *_: pytest.fail("it was submitted"))
    configs = config("launcher.after=[evaluate]", f"evaluation.data_dir={tmp_path}", f"runs_dir={tmp_path / 'runs'}")
    with pytest.raises(ConfigError, match=r"lambada_openai\.jsonl"):
        submit.run_all(configs)
    assert not (tmp_path / "runs").exists()


def config(*overrides: str) -> Any:
    arguments, _ = compose.parse([*overrides, "launcher=slurm"])
    return compose.compose(arguments)


@pytest.mark.parametrize(
    ("ranks_per_node", "num_nodes", "expected"),
    [(16, 1, (1, 8)), (4, 2, (2, 4)), (3, 4, (4, 2)), (1, 8, (8, 1))],
)
def test_ranks_are_shared_out_evenly(ranks_per_node: int, num_nodes: int, expected: tuple[int, int]) -> None:
    cluster = (f"cluster.ranks_per_node={ranks_per_node}", f"cluster.num_nodes={num_nodes}")
    (one,) = config("parallel=pp4_dp2", *cluster)
    resources = Resources.of(one)
    assert (resources.nodes, resources.ranks_per_node) == expected


def test_ranks_that_can_not_be_shared_out() -> None:
    (one,) = config("parallel=pp4_dp2", "cluster.ranks_per_node=3", "cluster.num_nodes=3")
    with pytest.raises(ConfigError, match="share out evenly"):
        Resources.of(one)


def test_a_sweep_needs_no_flag() -> None:
    assert len(config("training.seed=1,2,3")) == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("launcher.time_limit_h=0.01", "at least a minute"),
        ("launcher.container.engine=pyxis", "launcher.container.image"),
        ("launcher.sbatch=['--time=3']", "launcher.time_limit_h=HOURS"),
        ("launcher.srun=[x]", "in the form --NAME"),
        ("task=benchmark", "task=train"),
    ],
)
def test_wrong_settings(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(override)
    assert said in str(error.value)
