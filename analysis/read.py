"""One run folder as rows of the tables in :mod:`analysis.columns`. Never raises because of what a folder holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from analysis.columns import SCHEMA, TABLES
from optimus_cc.files import read_bytes
from optimus_cc.records import from_json, is_record, read_json_object
from optimus_cc.runs import RunFolder, traffic_per_step

Rows = dict[str, list[Any]]
"""Column by column."""
_STABLE = frozenset({"finished", "failed", "cancelled", "preempted"})


@dataclass
class Found:
    """What one folder holds."""

    name: str
    """The run's id as its own files tell it."""
    tables: dict[str, Rows] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def stamp(folder: RunFolder) -> str | None:
    """Changes when a file that is read changes; None if there is none."""
    marks = []
    files: list[str | Path] = [
        folder.config_path,
        folder.provenance_path,
        folder.status_path,
        folder.summary_path,
        folder.metrics_path,
    ]
    try:
        evaluations = sorted(entry.path for entry in os.scandir(folder.evaluation))
    except OSError:
        evaluations = []
    for file in (*files, *evaluations):
        try:
            found = os.stat(file)
            marks.append((os.path.basename(file), found.st_size, found.st_mtime_ns, found.st_ino))
        except OSError:
            continue
    return hashlib.sha256(repr((SCHEMA, marks)).encode()).hexdigest()[:16] if marks else None


def is_settled(state: str) -> bool:
    """Whether a run in this state stays as it is while its files do."""
    return state in _STABLE


def read(folder: RunFolder, mark: str | None) -> Found:
    """All that is known of a run; of one that did not finish its row in ``runs`` alone."""
    status, provenance = folder.status(), folder.provenance() or {}
    summary = folder.summary()
    config = folder.config()
    science = _mapping(provenance.get("scientific"))
    run_id = _text(provenance.get("run_id")) or _text((summary or {}).get("run_id")) or folder.run_id
    found = Found(run_id)
    state = "unknown" if status is None else "abandoned" if status.abandoned else status.state
    if status is None:
        found.remarks.append("no status that can be read" if folder.status_path.exists() else "no status yet")
    if config is None:
        found.remarks.append("config.yaml can't be read" if folder.config_path.exists() else "no config.yaml")
    if state == "finished" and summary is None:
        found.remarks.append("finished, but its summary can't be read")
        state = "unknown"
    if not science:
        found.remarks.append("no provenance that can be read, so it can't be compared with other runs")
    row = {
        "run": run_id,
        "folder": os.path.relpath(folder.path),
        "state": state,
        "cause": None if status is None else status.cause,
        "started": _text(provenance.get("created")) or (status.started if status else None),
        "total_steps": status.total_steps if status else None,
        "steps": status.step if status else None,
        "device": status.device if status else None,
        "host": _text(provenance.get("host")) or (status.host if status else None),
        "commit": _text(_mapping(provenance.get("git")).get("commit")),
        "stamp": mark,
        **_of_config(run_id, config or {}, science),
        **_of_summary(summary or {}),
    }
    found.tables["runs"] = {name: [row.get(name)] for name in TABLES["runs"]}
    if state == "finished":
        found.tables["metrics"], found.tables["probes"] = _records(folder.metrics_path, run_id)
        found.tables["traffic"] = _traffic(run_id, summary or {})
        found.tables["evaluation"] = _evaluation(run_id, folder.evaluation, found.remarks)
    elif state not in ("unknown", "queued", "running"):
        found.remarks.append(f"{state}{f': {status.cause}' if status and status.cause else ''}; not used")
    elif state != "unknown":
        found.remarks.append(f"{state}; not used yet")
    return found


def _of_config(run_id: str, config: Mapping[str, Any], science: Mapping[str, Any]) -> dict[str, Any]:
    model, parallel = _mapping(config.get("model")), _mapping(config.get("parallel"))
    training, technique = _mapping(config.get("training")), _mapping(config.get("technique"))
    name = _text(model.get("name")) or ""
    label, _, _ = (run_id.rsplit("-", 3) + [""] * 3)[1:4] if run_id.count("-") >= 3 else (None, None, None)
    layout = run_id.rsplit("-", 3)[0].removeprefix(f"{name}-") if label else None
    cb, sc = _mapping(technique.get("cb")), _mapping(technique.get("sc"))
    ranks = {}
    usual = True
    for key, node in (("cb", cb), ("sc", sc)):
        codec = _mapping(node.get("codec"))
        on = node.get("enabled") is True
        rank = codec.get("rank", codec.get("match_rank")) if on else None
        ranks[f"{key}_rank"] = rank
        usual = usual and (rank is None or rank == node.get("default_rank"))
    row: dict[str, Any] = {
        "model": name or None,
        "layout": layout,
        "technique": label,
        "seed": training.get("seed"),
        "usual_ranks": usual,
        **ranks,
        "sc_fraction": (sc.get("fraction") if sc.get("enabled") is True else 0.0) if technique else None,
    }
    for table, keys in (
        (model, ("num_layers", "hidden_size", "sequence_length")),
        (training, ("global_batch_size", "micro_batch_size")),
        (parallel, ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")),
    ):
        row |= {key: table.get(key) for key in keys}
    if science:
        without_seed = {**_mapping(science.get("training"))}
        without_seed.pop("seed", None)
        rest = {key: value for key, value in science.items() if key != "technique"}
        row["setting"] = _digest({**rest, "training": without_seed})
        row["variant"] = _digest(science.get("technique"))
    return row


def _of_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    times, validation = _mapping(summary.get("step_time_s")), _mapping(summary.get("validation"))
    row = {
        "num_parameters": summary.get("parameters"),
        "validation_loss": validation.get("loss"),
        "validation_token_perplexity": validation.get("perplexity"),
        "train_loss": _mapping(summary.get("train")).get("loss"),
        "tokens_per_s": summary.get("tokens_per_s"),
        "wall_s": summary.get("wall_s"),
        **{f"step_time_{key}_s": times.get(key) for key in ("mean", "median", "p95")},
    }
    return row | ({"steps": summary["steps"]} if "steps" in summary else {})


def _records(path: Path, run_id: str) -> tuple[Rows, Rows]:
    """The tables ``metrics`` and ``probes``."""
    trained, probed = [], []
    for record in read_records(path):
        kind = record.get("kind")
        if kind in ("train", "validation"):
            trained.append(record)
        elif kind == "probe":
            probed.append(record)
    metrics: Rows = {"run": [run_id] * len(trained)}
    for name in TABLES["metrics"]:
        if name != "run":
            metrics[name] = [record.get(name) for record in trained]
    probes: Rows = {"run": [run_id] * len(probed)}
    for name in TABLES["probes"]:
        if name.endswith("_fraction"):
            key = name.removesuffix("_fraction")
            probes[name] = [_mapping(record.get("fraction_of_step")).get(key) for record in probed]
        elif name != "run":
            probes[name] = [record.get(name) for record in probed]
    return metrics, probes


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Like :func:`optimus_cc.records.read_json_lines`, many lines at once; non-finite numbers stay strings."""
    try:
        data = read_bytes(path)
    except OSError:
        return
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    try:
        records: list[Any] = orjson.loads(b"[" + b",".join(line for line in lines if line) + b"]")
    except (ValueError, RecursionError):  # some line is damaged
        records = []
        for line in lines:
            try:
                records.append(from_json(line))
            except ValueError:
                continue
    yield from filter(is_record, records)


def _traffic(run_id: str, summary: Mapping[str, Any]) -> Rows:
    found = traffic_per_step(summary)
    return {
        "run": [run_id] * len(found),
        "traffic_class": list(found),
        "logical_bytes_per_step": [counts["logical_bytes"] for counts in found.values()],
        "wire_bytes_per_step": [counts["wire_bytes"] for counts in found.values()],
    }


def _evaluation(run_id: str, folder: Path, remarks: list[str]) -> Rows:
    """The results of every file in ``evaluation/``."""
    rows: Rows = {name: [] for name in TABLES["evaluation"]}
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError:
        return rows
    for file in files:
        content = read_json_object(file)
        if content is None:
            remarks.append(f"evaluation/{file.name} can't be read")
            continue
        common = {
            "run": run_id,
            "kind": content.get("kind"),
            "step": _mapping(content.get("checkpoint")).get("step"),
            "limit": content.get("limit"),
            "source": file.name,
        }
        # A zero-shot evaluation has tasks with measures each; one of perplexities is its own and only one.
        for task, measured in ((None, content), *_mapping(content.get("tasks")).items()):
            for metric, found in _mapping(_mapping(measured).get("metrics")).items():
                counts = _mapping(_mapping(measured).get("items"))
                row = {**common, "task": task, "metric": metric, "items": counts.get("evaluated", counts.get("tokens"))}
                row |= {key: _mapping(found).get(key) for key in ("value", "standard_error")}
                for name, cells in rows.items():
                    cells.append(row.get(name))
    return rows


def codec_rows(folder: RunFolder) -> Rows:
    """The table ``codecs`` of one benchmark's folder; empty if it is another benchmark's, or did not finish."""
    summary, config = folder.summary() or {}, folder.config() or {}
    status, provenance = folder.status(), folder.provenance() or {}
    rows = [row for row in summary.get("codecs") or () if isinstance(row, Mapping)]
    common: dict[str, Any] = {
        "benchmark": folder.run_id,
        "model": None if _mapping(config.get("benchmark")).get("shapes") else _mapping(config.get("model")).get("name"),
        "device": summary.get("device", status.device if status else None),
        "host": _text(provenance.get("host")),
    }
    return {name: [common.get(name, row.get(name)) for row in rows] for name in TABLES["codecs"]}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
