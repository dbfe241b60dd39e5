"""``task=calibrate``: fits the cluster that was composed to a file of step times, and says what that was worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimus_cc.config.cluster import ClusterConfig, as_file
from optimus_cc.config.run import RunConfig
from optimus_cc.config.schema import changed
from optimus_cc.simulation import calibrate as fits
from optimus_cc.simulation.measured import read
from optimus_cc.simulation.report import can_be_written
from optimus_cc.simulation.trust import fitted_values

_REMARK = "Written by task=calibrate: what was fitted, and to what, stands under calibration."


def calibrate_cluster(config: RunConfig) -> dict[str, Any]:
    """Fit what ``config.simulation.measured`` tells, print how good that is, and write a cluster file if asked.

    All rows are fitted at once: one set of parameters for those inside a node and those over several.

    Raises:
        ConfigError: the file can't be read, or what it says can't be step times; nothing is written then.
    """
    simulation, cluster = config.simulation, config.cluster
    assert simulation.measured is not None
    if simulation.collectives is not None:
        ring = fits.ring_inside(simulation.collectives, cluster.intra_node)
        cluster = changed(cluster, intra_node=ring)
        print(
            f"rings inside a node, from {simulation.collectives}: {ring.ring_gbit_s:g} Gbit/s, {ring.latency_us:g} us "
            "a message"
        )
    samples = read(simulation.measured, cluster)
    measured = fits.Measurements.of(samples, simulation.gradient_bytes)
    parameters = fits.parameters_for(samples, cluster)
    before = measured.error_percent(cluster)
    print(f"{len(samples)} step times; before the fit {before:.2f} % off")
    if len(samples) < 2 * len(parameters):
        print(f"too few for {len(parameters)} parameters: what came out meets them, and says little of anything else")
    source = _source(config, cluster, len(samples), [parameter.key for parameter in parameters])
    found = fits.calibrate(measured, cluster, parameters, folds=simulation.folds, source=source)
    print(table(found))
    if simulation.cluster_file is not None:
        path = Path(simulation.cluster_file)
        with can_be_written("simulation.cluster_file", simulation.cluster_file):
            path.write_text(as_file(found.cluster, path.stem, [_REMARK]), encoding="utf-8")
        print(f"\ncluster    {path}")
    return {
        "measurements": len(samples),
        "error_before_percent": before,
        "error_percent": found.error_percent,
        "held_out_error_percent": found.held_out_error_percent if found.held_out_ratios else None,
        "held_out_inside_percent": found.held_out_of(across=False),
        "held_out_across_percent": found.held_out_of(across=True),
        "fitted": fitted_values(found.cluster),
    }


def _source(config: RunConfig, cluster: ClusterConfig, count: int, fitted: list[str]) -> str:
    """What the cluster's numbers then rest on: these step times, and for numbers that they don't tell what was there
    before."""
    assert config.simulation.measured is not None
    said = f"{Path(config.simulation.measured).name}, {count} step times"
    if config.simulation.collectives is not None:
        said += f"; rings inside a node: {Path(config.simulation.collectives).name}"
    before = cluster.calibration
    kept = [key for key in before.fitted if key not in fitted] if before else []
    if before and kept:
        said += f"; {', '.join(kept)} as before: {before.source}"
    return said


def table(found: fits.Calibration) -> str:
    """Errors of a calibration, in percent, and its numbers."""
    lines = [f"mean absolute error: {found.error_percent:.2f} % on what was fitted"]
    if found.held_out_ratios:
        said = ", ".join(f"{error:.2f}" for error in found.held_out_percent)
        lines.append(
            f"held out: {found.held_out_error_percent:.2f} %, each measurement predicted by a fit that had not seen it "
            f"({said} by part)"
        )
        for name, across in (("inside a node", False), ("over several nodes", True)):
            if (error := found.held_out_of(across=across)) is not None:
                lines.append(f"  {name}: {error:.2f} %")
        for key in ("hidden_size", "ranks", "micro_batch_size", "layout"):
            lines.append(f"  {key:<20} measurements  mean error  mean absolute error")
            for name, (count, mean, absolute) in fits.grouped(found, key).items():
                lines.append(f"    {name:<18} {count:12}  {mean:+8.2f} %  {absolute:17.2f} %")
    values = fitted_values(found.cluster)
    for parameter in found.parameters:
        value = values[parameter.key]
        edge = parameter.bound_at(value) is not None
        bounds = f"{parameter.low:g} to {parameter.high:g}"
        lines.append(f"  {parameter.key} = {value:g}  (allowed: {bounds}{'; at its bound' if edge else ''})")
    return "\n".join(lines)
