"""What ``python run.py LINE`` composes, in this process."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import yaml

from optimus_cc.config import RunConfig
from optimus_cc.config.compose import compose, parse


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
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 12, "files": {}}))
    (runs_dir / config.run_id / "config.yaml").write_text(yaml.safe_dump(config.to_mapping()))
    return config.run_id
