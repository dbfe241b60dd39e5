"""Mistakes in Hydra's own part of a configuration that Hydra itself meets only while, or after, the runs have run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from optimus_cc.config.errors import Problem

_AS_TYPED = ("overrides", "override_dirname")
"""Parts that hold the command line: what it refers to is looked up where it counts."""


def hydra_problems(composed: DictConfig) -> Iterator[Problem]:
    """What is wrong with ``composed.hydra``, a run's or that of a whole sweep."""
    hydra = composed.hydra
    written: Any = OmegaConf.to_container(hydra, resolve=False)
    batch = written["sweeper"].get("max_batch_size")
    if isinstance(batch, int) and batch < 1:
        yield Problem("hydra.sweeper.max_batch_size", batch, "a whole number of at least 1, or null", "leave it out")
    holder: Any = HydraConfig.instance()
    before = holder.cfg
    holder.cfg = composed  # what the resolver ${hydra:...} looks into
    try:
        with open_dict(hydra):
            for node, key, value in ((hydra.job, "id", "0"), (hydra.job, "num", 0), (hydra.runtime, "output_dir", ".")):
                if OmegaConf.is_missing(node, key):
                    node[key] = value  # Hydra fills it in when the run starts
        for node in (hydra, hydra.job):
            for key in node:
                if key in ("job", *_AS_TYPED) or OmegaConf.is_missing(node, key):
                    continue
                part = node[key]
                if OmegaConf.is_config(part):
                    OmegaConf.to_container(part, resolve=True)
        verbose = hydra.verbose
        if not isinstance(verbose, (bool, str, ListConfig)):
            allowed = "true, false, or the names of loggers"
            yield Problem("hydra.verbose", written["verbose"], allowed, "hydra.verbose=true")
        yield from _unwritable(hydra)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        reason = str(error).partition("\n")[0]
        found: Any = OmegaConf.to_container(composed, resolve=False)
        for part in key.split("."):
            found = found.get(part, "") if isinstance(found, dict) else ""
        yield Problem(key, found, f"a value ({reason})", f"{key}=VALUE, or leave it out")
    finally:
        holder.cfg = before


def plugin_problems(master: DictConfig) -> Iterator[Problem]:
    """Which part of a sweep is nothing that Hydra could load."""
    for kind in ("launcher", "sweeper"):
        target = master.hydra[kind].get("_target_")
        if target not in Plugins.instance().class_name_to_class:
            key = f"hydra.{kind}._target_"
            yield Problem(key, target, f"a {kind} that is installed", f"leave it out, or hydra/{kind}=OPTION")


def _unwritable(hydra: DictConfig) -> Iterator[Problem]:
    """Which of the folders that Hydra makes it could not make."""
    sub = str(hydra.output_subdir or "")
    for key, folder in (("run.dir", hydra.run.dir), ("sweep.dir", hydra.sweep.dir)):
        place = Path(str(folder)).absolute()
        for name, wanted in ((key, place), ("output_subdir", place / sub)):
            there = next(path for path in (wanted, *wanted.parents) if path.exists())
            if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
                value = str(folder) if name == key else sub
                yield Problem(f"hydra.{name}", value, "a folder that can be made", f"leave hydra.{name} out")
                return


def missing_variable(error: KeyError) -> str:
    """What a KeyError says that Hydra lets through: only ``hydra.job.env_copy`` looks something up unchecked."""
    name = error.args[0] if error.args else ""
    if name not in os.environ:
        return f"hydra.job.env_copy: there is no environment variable {name}"
    return f"{name} is missing"
