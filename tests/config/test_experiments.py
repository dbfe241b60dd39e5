"""Recipes: what each table and figure of the paper is made of, at the paper's size and at a laptop's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimus_cc.config import ConfigError, RunConfig
from optimus_cc.config.compose import CONF
from optimus_cc.config.help import help_text
from tests.config.command_line import composed

FOLDER = CONF / "experiment"
NAMES = [
    "table_pretraining",
    "table_zero_shot",
    "table_lazy_error",
    "figure_motivation",
    "figure_perplexity",
    "figure_breakdown",
    "figure_error_independence",
    "figure_memory",
    "figure_layouts",
    "figure_codec_throughput",
    "figure_stage_fraction_rank",
    "figure_scaling",
]
SAME = {
    "table_zero_shot": "table_pretraining",
    "figure_perplexity": "table_pretraining",
    "figure_memory": "figure_breakdown",
}
"""Recipes that are others' runs."""
QUALITY = ["table_pretraining", "table_lazy_error", "figure_motivation", "figure_stage_fraction_rank"]
RECIPES = [f"{place}{name}" for place in ("", "laptop/") for name in NAMES]
STUDY = "laptop/reproduce"
"""What ``make reproduce`` runs: all techniques, for the tables and figures together."""
OWN = [recipe for recipe in RECIPES if recipe.removeprefix("laptop/") not in SAME]


def content(recipe: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    return found


def params(recipe: str) -> dict[str, str]:
    found: dict[str, str] = content(recipe)["hydra"]["sweeper"]["params"]
    return found


@cache
def runs(recipe: str) -> tuple[RunConfig, ...]:
    """Those of the first seed."""
    measured = recipe.endswith("figure_codec_throughput")
    line = f"experiment={recipe}{'' if measured else ' launcher.dry_run=true training.seed=1234'}"
    return tuple(composed(line))


def ids(recipe: str) -> set[str]:
    return {config.run_id for config in runs(recipe)}


def test_there_is_one_for_each_table_and_figure() -> None:
    assert sorted(str(file.relative_to(FOLDER).with_suffix("")) for file in FOLDER.rglob("*.yaml")) == sorted(
        [*RECIPES, STUDY]
    )


def test_the_study_compares_all_techniques_over_seeds_and_measures_all_that_its_figures_need() -> None:
    """And in runs of its own: those of other recipes are longer."""
    configs = composed(f"experiment={STUDY}")
    techniques = [config.technique.label for config in configs]
    assert {techniques.count(name) for name in techniques} == {3}
    assert set(techniques) == {
        "baseline",
        "cb",
        "cb_fe",
        "cb_fe_sc",
        "cb_naive",
        "cb_no_epilogue",
        "cb_no_lazy_error",
        "cb_topk",
        "naive_dp",
    }
    assert len({config.run_id for config in configs}) == len(configs)
    for config in configs:
        probes = config.training.probes
        assert probes.memory
        assert probes.phases
        assert probes.error_independence == config.technique.cb.enabled
        sc = config.technique.sc
        assert not sc.enabled or sc.warmup_steps < config.training.steps // 2
        assert not any(config.run_id in ids(recipe) for recipe in OWN if recipe.startswith("laptop/"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_line_says_what_it_makes_and_what_it_costs(recipe: str) -> None:
    text = (FOLDER / f"{recipe}.yaml").read_text()
    first = " ".join(line.removeprefix("# ") for line in text.split("\n")[1:] if line.startswith("# "))
    kind = recipe.rpartition("/")[2].partition("_")[0].capitalize()
    assert re.match(rf"{kind} (of|that) ", first)
    assert re.search(r"\b(minutes?|hours?|days)\b|no(ne| run) of its own", first)


@pytest.mark.parametrize("recipe", OWN)
def test_a_recipe_is_a_sweep_of_different_runs(recipe: str) -> None:
    """All of them compose, so all are right; ``-m`` is not needed."""
    configs = runs(recipe)
    assert len(configs) > 1
    assert len(ids(recipe)) == len(configs)
    for config in configs:
        if recipe.startswith("laptop/"):
            assert config.parallel.world_size <= 16
            assert config.cluster.name == "local"
        elif config.task.name == "train":
            assert config.cluster.name == "a100_hdr200"
            assert config.parallel.world_size >= 128
            assert (config.training.global_batch_size, config.training.micro_batch_size) == (512, 8)
            assert config.optimizer.decay_steps == 320000


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in OWN])
def test_a_recipe_without_runs_of_its_own_is_anothers(recipe: str) -> None:
    place, name = recipe.removesuffix(recipe.rpartition("/")[2]), recipe.rpartition("/")[2]
    evaluates = {"evaluation": {"after_training": True}} if name == "table_zero_shot" else {}
    assert content(recipe) == {"defaults": [f"{place}{SAME[name]}", "_self_"], **evaluates}


def test_such_a_recipe_composes_to_the_others_runs() -> None:
    (config,) = composed("experiment=laptop/figure_memory technique=cb_fe")
    assert config in [dataclasses.replace(one, launcher=config.launcher) for one in runs("laptop/figure_breakdown")]


@pytest.mark.parametrize("name", QUALITY)
def test_comparisons_of_quality_have_three_seeds(name: str) -> None:
    assert params(f"laptop/{name}")["training.seed"] == "1234,1,2"


def test_the_papers_table() -> None:
    configs = runs("table_pretraining")
    assert [(config.model.name, config.technique.name) for config in configs] == [
        (model, technique)
        for model in ("gpt_2_5b", "gpt_8_3b")
        for technique in ("baseline", "cb", "cb_fe", "cb_fe_sc")
    ]
    for config in configs:
        assert (config.parallel.label, config.training.steps) == ("tp8_pp4_dp4", 230000)


def shared(place: str) -> Iterator[tuple[set[str], int]]:
    """Runs that two recipes have in common, and how many there should be."""
    table, lazy = ids(f"{place}table_pretraining"), ids(f"{place}table_lazy_error")
    yield lazy & table, 2
    yield ids(f"{place}figure_error_independence") & lazy, 2
    yield ids(f"{place}figure_stage_fraction_rank") & table, 2
    yield ids(f"{place}figure_layouts") & ids(f"{place}figure_breakdown"), 2
    yield ids(f"{place}figure_motivation") & table, 1 if place else 0  # the paper's is shorter
    yield ids(f"{place}figure_scaling") & ids(f"{place}figure_breakdown"), 2 if place else 4
    yield ids(f"{place}figure_breakdown") & table, 0  # short ones are enough


@pytest.mark.parametrize("place", ["", "laptop/"])
def test_no_run_is_computed_twice(place: str) -> None:
    for common, number in shared(place):
        assert len(common) == number, common


def test_a_recipe_is_what_the_same_options_are_without_it() -> None:
    by_hand = composed("-m technique=baseline,cb_fe_sc parallel=pp4_dp2")
    assert {config.run_id for config in by_hand} < ids("laptop/table_pretraining")


@pytest.mark.parametrize("place", ["", "laptop/"])
def test_shared_runs_measure_all_that_any_figure_needs_of_them(place: str) -> None:
    """Probes are no part of an id: whichever recipe comes first decides what is measured."""
    probes: dict[str, Any] = {}
    for recipe in OWN:
        if recipe.startswith("laptop/") != bool(place) or recipe.endswith("figure_codec_throughput"):
            continue
        for config in runs(recipe):
            assert probes.setdefault(config.run_id, config.training.probes) == config.training.probes
            cb = config.technique.cb.enabled
            full = config.training.steps in (300, 230000)
            assert config.training.probes.error_independence == (cb and full)
            assert (
                config.training.probes.phases == config.training.probes.memory == (config.training.steps in (60, 200))
            )


def test_the_command_line_wins() -> None:
    (config,) = composed("experiment=laptop/table_pretraining technique=cb training.seed=7 parallel=pp4")
    assert (config.technique.name, config.training.seed, config.parallel.label) == ("cb", 7, "pp4")
    wider = composed(
        "-m experiment=table_pretraining technique=cb model=gpt_8_3b training.seed=1,2,3 launcher.dry_run=true"
    )
    assert [config.training.seed for config in wider] == [1, 2, 3]
    longer = composed(
        "experiment=laptop/figure_breakdown technique=baseline training.steps=80 training.probes.phases=false"
    )
    assert [(config.training.steps, config.training.probes.phases) for config in longer] == [(80, False)]


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    """The one that the page shows."""
    (example,) = re.findall(r"```yaml\n(.*?)```", (CONF.parent / "docs" / "experiments.md").read_text(), re.DOTALL)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(example)
    configs = composed(f"--config-dir {tmp_path} experiment=mine training.seed=5")
    assert [config.compressed_message_nbytes for config in configs] == [3072, 6144, 12288]
    assert {config.parallel.label for config in configs} == {"pp4_dp2"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("experiment=all", r"allowed: one of figure_breakdown, .*laptop/table_zero_shot\n"),
        ("-m experiment=all", r"allowed: one of figure_breakdown, .*laptop/table_zero_shot\n"),
        ("experiment=laptop/table_pretrainig", "did you mean experiment=laptop/table_pretraining"),
        ("experiment=table_lazy_eror", "did you mean experiment=table_lazy_error"),
        ("+experiment=table_lazy_error", "fix: +experiment=table_lazy_error"),
        ("-m experiment=table_lazy_error,table_zero_shot", "one experiment for all runs of a sweep"),
        ("experiment=laptop/table_pretraining +ablation=cb_naive", "which ablation=cb_naive is about"),
        ("experiment=laptop/figure_layouts technique=sc parallel=pp4", "technique.sc.enabled = true"),
        ("experiment=table_pretraining", "1 with launcher=local"),
    ],
)
def test_mistakes(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        composed(line)
    assert len(caught.value.problems) == 1


def test_help_lists_them() -> None:
    text = " ".join(help_text([CONF]).split())
    assert all(recipe in text for recipe in RECIPES)
