"""Runs a benchmark on this machine: one process per rank, a folder of its own, a table at the end."""

from __future__ import annotations

import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

from launchers import own_folder
from launchers.local import choose_device, relative
from launchers.progress import PLAIN_INTERVAL_S, Progress
from launchers.supervise import Stop
from optimus_cc.benchmark import report
from optimus_cc.config import RunConfig
from optimus_cc.config.benchmark import CodecsConfig, LinksConfig, benchmark_notices
from optimus_cc.runs import BENCHMARKS, RunFailed, RunFolder


def benchmark(config: RunConfig) -> dict[str, Any]:
    """Measure what ``config.benchmark`` says.

    It leaves ``runs_dir/benchmarks/NAME-LAYOUT-TIME`` with the files of a run folder that make sense here:
    ``config.yaml``, ``provenance.json``, ``metrics.jsonl`` (each sample) and ``summary.json`` (the result); for links
    also ``conf/cluster/NAME.yaml``.

    Returns:
        the result.

    Raises:
        ConfigError: it can't run on this machine; nothing was started.
        RunFailed: a rank failed, or somebody asked for an end.
    """
    alone = isinstance(config.benchmark, CodecsConfig)
    layout, ranks = ("single", 1) if alone else (config.parallel.label, config.parallel.world_size)
    device, notices = choose_device(config, ranks)
    progress = Progress(0)
    with Stop().on_signals() as stop:
        name = config.benchmark.name
        folder = own_folder.make_folder(config, BENCHMARKS, f"{name}-{layout}")
        told = (*notices, *benchmark_notices(config))
        own_folder.show_heading(progress, "benchmark", f"{name}, {layout}", ranks, device, folder, told)
        _run(config, folder, ranks, device, stop, progress)
    result = folder.summary()
    if result is None:
        raise RunFailed("the ranks ended without a result", f"  See their logs in {folder.logs}.")
    print(report.table(result))
    if isinstance(config.benchmark, LinksConfig):
        _write_cluster_files(config, config.benchmark, folder, device, result)
    return result


def _run(config: RunConfig, folder: RunFolder, ranks: int, device: str, stop: Stop, progress: Progress) -> None:
    shown = 0.0

    def on_records(records: list[dict[str, Any]]) -> None:
        nonlocal shown
        if time.monotonic() - shown >= PLAIN_INTERVAL_S:
            shown = time.monotonic()
            progress.phase(f"measuring: {records[-1]['done']}/{records[-1]['total']}")

    command = [sys.executable, "-m", "optimus_cc.benchmark", str(folder.path)]
    try:
        own_folder.run(command, ranks, config, device, folder, stop, progress, on_records)
    except RunFailed as error:
        raise type(error)(f"the benchmark ended: {error.cause}", error.details) from None


def _write_cluster_files(
    config: RunConfig, links: LinksConfig, folder: RunFolder, device: str, result: dict[str, Any]
) -> None:
    origin = folder.provenance() or {}
    versions = origin.get("versions", {})
    sizes = links.sizes_bytes
    remarks = [
        f"Links of {origin.get('host')}, measured at {origin.get('created')}; {config.parallel.label} on {device}.",
        f"{result['backend']}, " + ", ".join(f"{name} {versions.get(name)}" for name in ("torch", "megatron-core")),
        f"{len(sizes)} message sizes, {sizes[0]:,} to {sizes[-1]:,} bytes, {links.repetitions} repetitions of each.",
        "Lines fitted to time = latency + bytes that a rank sends / bandwidth:",
    ]
    measured = f"measured_{re.sub(r'[^A-Za-z0-9_.]', '_', socket.gethostname())}"[:40]
    own = folder.path / "conf" / "cluster" / f"{measured}.yaml"
    own.parent.mkdir(parents=True)
    for path in (own, *([Path(links.cluster_file)] if links.cluster_file else [])):
        text = report.cluster_file(result, path.stem, config.cluster, remarks)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:  # since the benchmark began
            raise RunFailed(f"{path} exists and is not overwritten", f"  The file is {own}.") from None
        print(f"cluster    {relative(path)}")
    print(f"to use it  python run.py --config-dir {relative(folder.path / 'conf')} cluster={measured} ...")
