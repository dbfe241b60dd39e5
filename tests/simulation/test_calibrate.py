"""Calibration: known hardware is found again, and measured times that no fit has seen are met as well as is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from optimus_cc.config import ConfigError
from optimus_cc.config.cluster import ClusterConfig
from optimus_cc.config.compose import CONF
from optimus_cc.simulation import calibrate as fits
from optimus_cc.simulation.hardware import hardware
from optimus_cc.simulation.measured import COLUMNS, Sample, configuration, parts, read
from optimus_cc.simulation.step import price
from optimus_cc.simulation.trust import is_calibrated, outside
from optimus_cc.simulation.values import value_of, with_values
from tests.shared import SHARED
from tests.simulation.configurations import PAPER, changed, composed, needs_measurements

STEP_TIMES = SHARED / "data" / "a100_step_times"


def cluster() -> ClusterConfig:
    return composed("cluster=a100_hdr800").cluster


def rows(tp: int, dp: int, pp: int, hidden: int, micro: int, microbatches: int, layers: int = 16) -> dict[str, int]:
    values = (tp * dp * pp, micro * microbatches * dp, micro, hidden, 16, layers, 1024, tp, dp, pp)
    return dict(zip(COLUMNS[:-1], values, strict=True))


def made_up(true: ClusterConfig) -> list[Sample]:
    """Step times that ``true`` would show."""
    shapes = [(1, 4, 1), (2, 2, 1), (1, 1, 4), (2, 1, 4), (4, 1, 2), (8, 4, 2), (4, 8, 2), (8, 2, 4)]
    samples = [
        Sample(configuration(rows(*shape, hidden, micro, 8), true), 1.0)
        for shape in shapes
        for hidden in (1024, 4096)
        for micro in (1, 4)
    ]
    rates = hardware(true, "bf16", "effective")
    plans = fits.Measurements.of(samples).plans
    return [Sample(one.config, price(step, rates).total_s) for one, step in zip(samples, plans, strict=True)]


def test_known_hardware_is_found_again() -> None:
    truth = {
        "device.efficiency.matmul_bf16": 0.6,
        "device.efficiency.memory": 0.7,
        "device.efficiency.kernel_us": 12.0,
        "inter_node.ring_gbit_s": 40.0,
    }
    measured = fits.Measurements.of(made_up(with_values(cluster(), truth)))
    low_high = {"device.efficiency.kernel_us": (2.0, 40.0), "inter_node.ring_gbit_s": (1.0, 100.0)}
    parameters = [
        fits.Parameter(key, 0.5 if value < 1 else 20.0, *low_high.get(key, (0.3, 0.9))) for key, value in truth.items()
    ]
    found = fits.calibrate(measured, cluster(), parameters, folds=2, source="made up")
    assert found.error_percent < 0.5
    assert found.held_out_error_percent < 1.0
    for key, value in truth.items():
        node: Any = found.cluster
        for part in key.split("."):
            node = getattr(node, part)
        assert node == pytest.approx(value, rel=0.03), key
    record = found.cluster.calibration
    assert record is not None
    assert record.fitted == tuple(truth)
    assert record.hidden_size == (1024, 4096)
    assert record.held_out_error_percent == round(found.held_out_error_percent, 2)


def test_fits_stay_within_their_bounds() -> None:
    measured = fits.Measurements.of(made_up(with_values(cluster(), {"device.efficiency.matmul_bf16": 0.9})))
    found = fits.fit(measured, cluster(), [fits.Parameter("device.efficiency.matmul_bf16", 0.4, 0.3, 0.5)])
    assert found.device.efficiency.matmul_bf16 == pytest.approx(0.5)


def test_parts_depend_on_what_was_run_alone() -> None:
    samples = made_up(cluster())
    first, second = parts(samples, 3), parts(samples[::-1], 3)
    assert [[s.config.run_id for s in part] for part in first] == [[s.config.run_id for s in part] for part in second]
    assert sorted(id(s) for part in first for s in part) == sorted(map(id, samples))
    assert max(map(len, first)) - min(map(len, first)) <= 1
    slower = [dataclasses.replace(sample, seconds=9.0) for sample in samples]
    assert [sample.place for sample in slower] == [sample.place for sample in samples]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_files_that_make_no_sense(tmp_path: Path) -> None:
    header = ",".join(COLUMNS)
    with pytest.raises(ConfigError, match="iteration_time_ms"):
        read(write(tmp_path / "a.csv", "gpus,layers", "8,4"), cluster())
    good = "8,16,2,1024,16,16,1024,1,8,1,4"
    wrong = [good[:-1] + milliseconds for milliseconds in ("x", "-4", "nan", "inf")]
    for row in (*wrong, "8,16,3,1024,16,16,1024,1,8,1,4", f"16{good[1:]}", good[:9]):
        with pytest.raises(ConfigError, match="line 2"):
            read(write(tmp_path / "a.csv", header, row), cluster())
    latin = tmp_path / "latin.csv"
    latin.write_bytes(f"{header}\n{good}\xe9\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8"):
        read(latin, cluster())
    assert len(read(write(tmp_path / "mark.csv", f"\ufeff{header}", good), cluster())) == 1  # as spreadsheets begin it
    with pytest.raises(ConfigError, match=r"simulation\.measured"):
        composed("task=calibrate cluster=a100_hdr800")
    file = write(tmp_path / "b.csv", header)
    for name in (file, tmp_path / "no-name-of-a-cluster.yaml"):
        with pytest.raises(ConfigError, match=r"simulation\.cluster_file"):
            composed(f"task=calibrate cluster=a100_hdr800 simulation.measured={file} simulation.cluster_file={name}")


@pytest.mark.parametrize(
    ("name", "line"),
    [("gpus_2", "8,0"), ("gpus_2", "8,nan"), ("gpus_2", "8"), ("gpus_2", ""), ("gpus_x", "8,9"), ("gpus_1", "8,9")],
)
def test_times_of_collectives_that_make_no_sense(tmp_path: Path, name: str, line: str) -> None:
    write(tmp_path / f"{name}.csv", "bytes,time_ns", line)
    with pytest.raises(ConfigError, match=name):
        fits.ring_inside(tmp_path, cluster().intra_node)


def test_few_measurements_are_cut_in_few_parts() -> None:
    samples = made_up(cluster())
    parameters = fits.between_nodes(cluster())[1:]
    found = fits.calibrate(fits.Measurements.of(samples[-3:]), cluster(), parameters, folds=5)
    assert (len(found.held_out_ratios), len(found.held_out_percent)) == (3, 3)
    record = fits.calibrate(fits.Measurements.of(samples[-1:]), cluster(), parameters, folds=5).cluster.calibration
    assert record is not None
    assert record.held_out_error_percent is None


def test_what_was_not_measured_is_said_to_be_outside() -> None:
    config = composed(f"model=gpt_8_3b technique=cb {PAPER}")
    assert is_calibrated(config)
    assert not is_calibrated(changed(config, training={"precision": "bf16"}))
    (said,) = outside(changed(config, training={"micro_batch_size": 4}))
    assert "micro_batch_size 4 (measured: 8 to 8)" in said
    assert not is_calibrated(
        composed("model=gpt_8_3b technique=cb parallel=tp8_pp4_dp4 cluster=h100_ndr400 training=paper")
    )


def test_a_number_that_somebody_has_set_is_no_fitted_one() -> None:
    config = composed(f"model=gpt_8_3b technique=cb {PAPER} cluster.inter_node.ring_gbit_s=0.5")
    (said,) = outside(config)
    fitted = composed(f"model=gpt_8_3b technique=cb {PAPER}").cluster.inter_node.ring_gbit_s
    assert said == f"inter_node.ring_gbit_s 0.5 (fitted: {fitted:g})"
    assert not is_calibrated(config)


def test_what_was_fitted_is_what_a_calibration_notes() -> None:
    measured = fits.Measurements.of(made_up(with_values(cluster(), {"inter_node.ring_gbit_s": 50.0})))
    parameters = [fits.Parameter("inter_node.ring_gbit_s", 20.0, 1.0, 90.0)]
    found = fits.calibrate(measured, cluster(), parameters, folds=2).cluster
    assert found.calibration is not None
    assert found.calibration.values == (found.inter_node.ring_gbit_s,)


@needs_measurements
def test_rings_inside_a_node_are_those_of_the_table() -> None:
    ring = fits.ring_inside(SHARED / "data" / "a100_nvlink_allreduce", cluster().intra_node)
    shipped = cluster().intra_node
    assert (ring.ring_gbit_s, ring.latency_us) == (shipped.ring_gbit_s, shipped.latency_us)
    assert ring.ring_gbit_s is not None
    assert 0.5 * 2400 < ring.ring_gbit_s < 2400


@needs_measurements
def test_step_times_that_no_fit_has_seen() -> None:
    """A tenth of the rows inside one node and half of the quick ones over several are fitted, at once; other rows of
    both kinds are met about as well as is aimed for."""
    base = cluster()
    seen: list[Sample] = []
    unseen: dict[bool, list[Sample]] = {False: [], True: []}
    for index, part in enumerate(parts(read(STEP_TIMES / "single_node.csv", base), 10)):
        (seen if index == 0 else unseen[False]).extend(part if index == 0 else part[::6])
    quick = [s for s in read(STEP_TIMES / "multi_node.csv", base) if s.config.num_microbatches <= 32]
    fitted, unseen[True] = parts(quick, 2)
    seen += fitted
    found = fits.fit(fits.Measurements.of(seen, 2), base, fits.parameters_for(seen, base))
    assert fits.Measurements.of(unseen[False], 2).error_percent(found) <= 6.5
    assert fits.Measurements.of(unseen[True], 2).error_percent(found) <= 10


@needs_measurements
def test_the_shipped_cluster_is_as_good_as_its_file_and_the_page_say() -> None:
    base = cluster()
    record = base.calibration
    assert record is not None
    assert record.error_percent is not None
    inside, across = (read(STEP_TIMES / f"{name}_node.csv", base) for name in ("single", "multi"))
    every = fits.Measurements.of([*inside, *across], 2)
    assert every.error_percent(base) == pytest.approx(record.error_percent, abs=0.01)
    assert fits.measured_range([*inside, *across]) == {key: getattr(record, key) for key in fits.measured_range(inside)}
    assert record.at_bound == fits.at_bound(base, fits.parameters_for([*inside, *across], base))
    assert str(len(every.samples)) in record.source
    said = (CONF.parent / "docs" / "simulation.md").read_text(encoding="utf-8")
    for name, samples, held_out in (
        ("inside a node", inside, record.held_out_inside_percent),
        ("over several nodes", across, record.held_out_across_percent),
    ):
        error = every.subset(samples).error_percent(base)
        assert f"| {name} | {len(samples)} | {error:.2f} % | {held_out:.2f} % |" in said
    for key in record.at_bound:
        assert f"`{key}`" in said


def test_an_8_gpu_layout_lies_inside_what_the_shipped_cluster_was_fitted_to() -> None:
    line = "model=gpt_2_5b technique=baseline training.precision=bf16 cluster=a100_hdr800 training=paper"
    config = composed(f"{line} parallel=tp8_pp4_dp4 parallel.pipeline_parallel_size=1 parallel.data_parallel_size=1")
    assert outside(config) == []


def test_the_task_fits_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from optimus_cc.simulation.calibrate_task import calibrate_cluster

    truth = with_values(cluster(), {"inter_node.ring_gbit_s": 30.0, "device.efficiency.matmul_bf16": 0.5})
    lines = [",".join(COLUMNS)]
    for sample in made_up(truth):
        if sample.config.parallel.world_size > 8:
            c = sample.config
            values = (
                c.parallel.world_size,
                c.training.global_batch_size,
                c.training.micro_batch_size,
                c.model.hidden_size,
            )
            sizes = (c.parallel.tensor_parallel_size, c.parallel.data_parallel_size, c.parallel.pipeline_parallel_size)
            lines.append(",".join(map(str, (*values, 16, c.model.num_layers, 1024, *sizes, 1e3 * sample.seconds))))
    file, out = write(tmp_path / "times.csv", *lines), tmp_path / "cluster" / "mine.yaml"
    out.parent.mkdir()
    line = f"task=calibrate cluster=a100_hdr800 simulation.measured={file} simulation.cluster_file={out}"
    result = calibrate_cluster(composed(f"{line} simulation.folds=2"))
    assert result["error_percent"] < 1 < result["error_before_percent"]
    assert result["held_out_inside_percent"] is None
    assert "held out:" in capsys.readouterr().out
    from tests.config.command_line import composed as compose

    (config,) = compose(f"--config-dir {tmp_path} task=simulate cluster=mine parallel=pp4")
    assert config.cluster.inter_node.ring_gbit_s == pytest.approx(30.0, rel=0.05)
    assert config.cluster.calibration is not None
    assert "times.csv" in config.cluster.calibration.source
    # What these rows don't tell stays what it was, and so does where it is from; nothing else is named.
    fitted = config.cluster.calibration.fitted
    before = cluster().calibration
    assert before is not None
    kept = [key for key in before.fitted if key not in fitted]
    assert all(key in config.cluster.calibration.source for key in kept)

    seconds = write(tmp_path / "seconds.csv", lines[0], *(_in_seconds(row) for row in lines[1:]))
    other = tmp_path / "cluster" / "other.yaml"
    line = f"task=calibrate cluster=a100_hdr800 simulation.measured={seconds} simulation.cluster_file={other}"
    with pytest.raises(ConfigError, match="milliseconds"):
        calibrate_cluster(composed(f"{line} simulation.folds=2"))
    assert not other.exists()


def _in_seconds(row: str) -> str:
    rest, _, milliseconds = row.rpartition(",")
    return f"{rest},{float(milliseconds) / 1e3}"


def test_one_run_with_two_times(tmp_path: Path) -> None:
    """Times that agree are one sample, so that it isn't both fitted and held out; others are refused."""
    header, row = ",".join(COLUMNS), "8,16,2,1024,16,16,1024,1,8,1"
    (sample,) = read(write(tmp_path / "a.csv", header, f"{row},100", f"{row},104"), cluster())
    assert sample.seconds == pytest.approx(0.102)
    with pytest.raises(ConfigError, match="lines 2 and 3"):
        read(write(tmp_path / "a.csv", header, f"{row},100", f"{row},130"), cluster())


def test_all_parameters_at_their_bounds_are_named() -> None:
    truth = {"device.efficiency.matmul_bf16": 0.9, "device.efficiency.kernel_us": 30.0}
    measured = fits.Measurements.of(made_up(with_values(cluster(), truth)))
    parameters = [
        fits.Parameter("device.efficiency.matmul_bf16", 0.4, 0.3, 0.5),
        fits.Parameter("device.efficiency.kernel_us", 5.0, 1.0, 60.0),
        fits.Parameter("inter_node.ring_gbit_s", 60.0, 50.0, 70.0),
    ]
    found = fits.calibrate(measured, cluster(), parameters, folds=1)
    assert found.cluster.calibration is not None
    edges = {p.key for p in parameters if value_of(found.cluster, p.key) in (p.low, p.high)}
    assert set(found.cluster.calibration.at_bound) == edges >= {"device.efficiency.matmul_bf16"}
