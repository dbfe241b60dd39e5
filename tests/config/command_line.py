"""What ``python run.py LINE`` composes, in this process."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from optimus_cc.config import RunConfig
from optimus_cc.config.compose import compose, parse


@contextlib.contextmanager
def composed_once() -> Iterator[None]:
    """What is composed again and again, fixes above all, takes its time once."""
    found: dict[str, Any] = {}
    load = ConfigLoaderImpl.load_configuration

    def load_once(self: ConfigLoaderImpl, *arguments: Any, **options: Any) -> Any:
        key = f"{os.getcwd()} {self.config_search_path} {arguments} {options}"
        if key not in found:
            found[key] = load(self, *arguments, **options)
        return copy.deepcopy(found[key])

    with mock.patch.object(ConfigLoaderImpl, "load_configuration", load_once):
        yield


def composed(line: str) -> list[RunConfig]:
    arguments, _ = parse(shlex.split(line))
    return compose(arguments)


def one(line: str = "") -> RunConfig:
    (config,) = composed(line)
    return config


def run_with_checkpoint(runs_dir: Path, line: str = "") -> str:
    """A run folder with one checkpoint, of step 12, as far as a configuration looks at it; its id."""
    config = one(f"{line} runs_dir={runs_dir}")
    checkpoint = runs_dir / config.run_id / "checkpoints" / "step_00000012"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 12, "files": {}, "scientific": {}}))
    (runs_dir / config.run_id / "config.yaml").write_text(yaml.safe_dump(config.to_mapping()))
    return config.run_id
