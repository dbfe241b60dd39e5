"""``task=calibrate``: fits the cluster that was composed to a file of step times, and says what that was worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimus_cc.config.cluster import as_file
from optimus_cc.config.run import RunConfig
from optimus_cc.config.schema import changed
from optimus_cc.simulation import calibrate as fits
from optimus_cc.simulation.measured import read
from optimus_cc.simulation.report import can_be_written
from optimus_cc.simulation.trust import fitted_values

_REMARK = "Written by task=calibrate: what was fitted, and to what, stands under calibration."


def calibrate_cluster(config: RunConfig) -> dict[str, Any]:
    """Fit what ``config.simulation.measured`` tells, print how good that is, and write a cluster file if asked.

    Rows inside one node are fitted first. Rows over several nodes are then predicted as they are, never fitted, and
    after that fitted themselves.

    Raises:
        ConfigError: the file can't be read.
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
    inside = [sample for sample in samples if not fits.spans_nodes([sample], cluster)]
    across = [sample for sample in samples if fits.spans_nodes([sample], cluster)]
    source = f"{Path(simulation.measured).name}, {len(samples)} step times"
    if cluster.calibration is not None:
        source = f"{cluster.calibration.source}; {source}"
    result: dict[str, Any] = {}
    for name, part in (("inside_nodes", inside), ("across_nodes", across)):
        if not part:
            continue
        measured = fits.Measurements.of(part, simulation.gradient_bytes)
        before = measured.error_percent(cluster)
        parameters = fits.DEVICE if part is inside else fits.between_nodes(cluster)
        found = fits.calibrate(measured, cluster, parameters, folds=simulation.folds, source=source)
        print(f"\n{name.replace('_', ' ')}: {len(part)} step times; before the fit {before:.2f} % off")
        if len(part) < 2 * len(parameters):
            print(
                f"too few for {len(parameters)} parameters: what came out meets them, and says little of anything else"
            )
        print(table(found))
        cluster = found.cluster
        result[name] = {
            "measurements": len(part),
            "error_before_percent": before,
            "error_percent": found.error_percent,
            "held_out_error_percent": found.held_out_error_percent if found.held_out_ratios else None,
            "fitted": fitted_values(cluster),
        }
    if simulation.cluster_file is not None:
        path = Path(simulation.cluster_file)
        with can_be_written("simulation.cluster_file", simulation.cluster_file):
            path.write_text(as_file(cluster, path.stem, [_REMARK]), encoding="utf-8")
        print(f"\ncluster    {path}")
    return result


def table(found: fits.Calibration) -> str:
    """Errors of a calibration, in percent, and its numbers."""
    lines = [f"mean absolute error: {found.error_percent:.2f} % on what was fitted"]
    if found.held_out_ratios:
        said = ", ".join(f"{error:.2f}" for error in found.held_out_percent)
        lines.append(
            f"held out: {found.held_out_error_percent:.2f} %, each measurement predicted by a fit that had not seen it "
            f"({said} by part)"
        )
        for key in ("hidden_size", "ranks", "micro_batch_size", "layout"):
            lines.append(f"  {key:<20} measurements  mean error  mean absolute error")
            for name, (count, mean, absolute) in fits.grouped(found, key).items():
                lines.append(f"    {name:<18} {count:12}  {mean:+8.2f} %  {absolute:17.2f} %")
    values = fitted_values(found.cluster)
    for parameter in found.parameters:
        value = values[parameter.key]
        edge = min(value - parameter.low, parameter.high - value) <= 1e-3 * (parameter.high - parameter.low)
        bounds = f"{parameter.low:g} to {parameter.high:g}"
        lines.append(f"  {parameter.key} = {value:g}  (allowed: {bounds}{'; at its bound' if edge else ''})")
    return "\n".join(lines)
