"""What items are made of: tables of runs, predictions, and the project's copy of what the paper states."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from analysis import statistics
from analysis.collect import Tables
from optimus_cc.config import ConfigError
from optimus_cc.runs import DIVERGED
from paper_figures.item import Configurations, Missing, Query

if TYPE_CHECKING:
    from optimus_cc.config import RunConfig
    from optimus_cc.simulation import Prediction

CLAIMS = Path(__file__).with_name("claims.yaml")


@dataclass
class Selection:
    """Finished runs of one setting, of the techniques that a query asks for."""

    runs: pd.DataFrame
    missing: tuple[str, ...]
    """Techniques that no run of this setting has."""
    query: Query

    @property
    def scale(self) -> str:
        """Model, layout, length and seeds, in words."""
        first = self.runs.iloc[0]
        seeds = self.runs.groupby("technique")["seed"].nunique()
        number = f"{seeds.min()}" if seeds.min() == seeds.max() else f"{seeds.min()} to {seeds.max()}"
        return (
            f"{first['model']} ({first['num_parameters'] / 1e6:.1f} M parameters), {first['layout']}, "
            f"{first['total_steps']} steps, {number} seed{'s' * int(seeds.max() != 1)}, {first['device']}"
        )

    @property
    def of_paper(self) -> bool:
        """Whether the model is one of the paper's."""
        return self.runs.iloc[0]["model"] in read_claims()["models"]

    @property
    def techniques(self) -> list[str]:
        """Those that are there, in the query's order."""
        there = set(self.runs["technique"])
        return [name for name in (*self.query.techniques, *self.query.extra) if name in there]

    def of(self, technique: str) -> pd.DataFrame:
        return self.runs[self.runs["technique"] == technique]

    def by_seed(self, technique: str, column: str) -> dict[int, float]:
        """A value for each seed, where there is one."""
        found = self.of(technique).dropna(subset=[column])
        return {int(seed): float(value) for seed, value in zip(found["seed"], found[column], strict=True)}

    def diverged(self, technique: str) -> list[int]:
        """Seeds of the runs with an infinite perplexity, or a loss that is no number, which ends a run by default."""
        own = self.of(technique)
        perplexity = own["validation_token_perplexity"]
        gone = (perplexity == math.inf) | (perplexity.isna() & own["train_loss"].isna())
        return [int(seed) for seed in own.loc[gone, "seed"]]

    def only_diverged(self, technique: str, against: str) -> str:
        """Says so if runs of one technique diverged where those of another one with the same seed did not."""
        others = set(self.by_seed(against, "validation_token_perplexity")) - set(self.diverged(against))
        seeds = [seed for seed in self.diverged(technique) if seed in others]
        if not seeds:
            return ""
        which = ", ".join(map(str, seeds))
        return f"{technique} diverged in {len(seeds)} of {len(others)} seeds ({which}), {against} in none of these"

    def mean(self, technique: str, column: str) -> statistics.Mean | None:
        values = list(self.by_seed(technique, column).values())
        return statistics.mean(values) if values else None

    def compare(self, technique: str, column: str, against: str | None = None) -> statistics.Comparison | None:
        """Against the query's baseline, or another technique; None where no seed has both."""
        baseline = self.by_seed(against or self.query.baseline, column)
        try:
            return statistics.compare(baseline, self.by_seed(technique, column))
        except ValueError:
            return None


@dataclass
class Data:
    """Tables of runs, and all else that items are made of."""

    tables: Tables
    used: dict[str, set[str]] = field(default_factory=dict)
    """Run ids that each item has looked at, by item."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """What each item wants said: what is missing, at what scale."""
    item: str = ""
    """The item that is being made."""

    @cached_property
    def paper(self) -> Mapping[str, Any]:
        return read_claims()

    @property
    def runs(self) -> pd.DataFrame:
        """Those that finished, or diverged and were stopped for it, and whose configuration could be read."""
        found = self.tables["runs"]
        stopped = (found["state"] == "failed") & found["cause"].fillna("").str.contains(DIVERGED, regex=False)
        found = found[(found["state"] == "finished") | stopped]
        found = found.dropna(subset=["technique", "seed", "model", "layout", "setting"])
        # Only a summary tells how many parameters a model has; a run that was stopped has none.
        number = found.groupby("setting")["num_parameters"].transform("max")
        return found.assign(num_parameters=found["num_parameters"].fillna(number))

    def select(self, query: Query) -> Selection:
        """The runs that a query asks for.

        Raises:
            Missing: there is none.
        """
        wanted = (*query.techniques, *query.extra)
        runs = self.runs[self.runs["technique"].isin(wanted) & self.runs["usual_ranks"].fillna(False)]
        if query.probe is not None:
            probes = self.tables["probes"]
            runs = runs[runs["run"].isin(probes.loc[probes["probe"] == query.probe, "run"].unique())]
        runs = runs.dropna(subset=["setting", "num_parameters"])
        if runs.empty:
            measured = f" with the probe {query.probe}" if query.probe else ""
            raise Missing(f"finished runs of {', '.join(query.techniques)}{measured}", query.command)
        order = runs.groupby("setting").agg(
            techniques=("technique", "nunique"), seeds=("seed", "nunique"), steps=("total_steps", "max")
        )
        best = order.sort_index().sort_values(["techniques", "seeds", "steps"], kind="stable").index[-1]
        chosen = runs[runs["setting"] == best].sort_values(["technique", "seed", "variant"], kind="stable")
        chosen = chosen.drop_duplicates(["technique", "seed"])
        missing = tuple(name for name in query.techniques if name not in set(chosen["technique"]))
        selection = Selection(chosen, missing, query)
        self.note_runs(chosen["run"])
        self.note(f"Measured: {selection.scale}.")
        for technique in selection.techniques:
            if seeds := selection.diverged(technique):
                which = ", ".join(map(str, seeds))
                self.note(f"Diverged, and in no curve: {technique}, seed{'s' * (len(seeds) != 1)} {which}.")
        if missing:
            self.note(f"Not there: {', '.join(missing)}. To make it: {query.command}")
        if extra := [name for name in query.extra if name not in set(chosen["technique"])]:
            self.note(f"Not there: {', '.join(extra)}. To make it: {query.extra_command}")
        return selection

    def table(self, name: str, runs: pd.DataFrame) -> pd.DataFrame:
        """Rows of a table that belong to some runs, with the runs' technique and seed."""
        keys = runs[["run", "technique", "seed", "model", "layout"]]
        return self.tables[name].merge(keys, on="run", suffixes=("", "_of_run"))

    def predict(self, need: Configurations, bandwidth: str = "effective") -> list[tuple[RunConfig, Prediction]]:
        """The simulator's answer to each configuration.

        Args:
            bandwidth: ``effective`` or ``line_rate``: see :func:`optimus_cc.simulation.predict`.

        Raises:
            Missing: nothing can be predicted.
        """
        found, reasons = [], []
        for line in need.overrides:
            try:
                found.append(_predicted(line, bandwidth))
            except ConfigError as error:
                reasons.append(f"{line}: {error.problems[0].sentence}")
        for reason in reasons:
            self.note(f"Not predicted: {reason}.")
        for source in sorted({one.cluster.calibration.source for one, _ in found if one.cluster.calibration}):
            self.note(f"Predicted; rates of devices and links were fitted to: {source}.")
        if not found:
            raise Missing("configurations that the simulator can predict", need.command)
        return found

    def note(self, text: str) -> None:
        said = self.notes.setdefault(self.item, [])
        if text not in said:
            said.append(text)

    def note_runs(self, runs: Sequence[str]) -> None:
        self.used.setdefault(self.item, set()).update(runs)


@cache
def _predicted(line: str, bandwidth: str) -> tuple[RunConfig, Prediction]:
    from optimus_cc.simulation import predict

    config = composed(line)
    return config, predict(config, bandwidth=bandwidth)


@cache
def composed(line: str) -> RunConfig:
    """What ``python run.py LINE`` would run."""
    from optimus_cc.config.compose import compose, parse

    arguments, _ = parse(shlex.split(line))
    (config,) = compose(arguments)
    return config


@cache
def read_claims() -> Mapping[str, Any]:
    found: dict[str, Any] = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    return found
