"""How far a prediction can be trusted, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator

from optimus_cc.config.cluster import CalibrationRecord, ClusterConfig
from optimus_cc.config.run import RunConfig
from optimus_cc.config.schema import changed
from optimus_cc.simulation.values import value_of
from optimus_cc.stage_traffic import vocabulary_size

_SMALL_VOCABULARY = 32_000
_LARGE_MODEL = 1024
"""Hidden size from which on a model is not a toy."""


def fitted_values(cluster: ClusterConfig) -> dict[str, float]:
    """The numbers of ``cluster`` that were fitted, by key."""
    keys = cluster.calibration.fitted if cluster.calibration else ()
    values = {key: value_of(cluster, key) for key in keys}
    return {key: value for key, value in values.items() if value is not None}


def recorded(cluster: ClusterConfig, record: CalibrationRecord) -> ClusterConfig:
    """``cluster`` with its ``record``, in which the fitted numbers are then noted."""
    values = tuple(fitted_values(changed(cluster, calibration=record)).values())
    return changed(cluster, calibration=changed(record, values=values))


def _set_since(cluster: ClusterConfig) -> list[str]:
    """Numbers that were fitted, and of which the configuration says something else."""
    record = cluster.calibration
    fitted = dict(zip(record.fitted, record.values, strict=False)) if record else {}
    now = fitted_values(cluster)
    return [f"{key} {now[key]:g} (fitted: {value:g})" for key, value in fitted.items() if now.get(key, value) != value]


def outside(config: RunConfig) -> list[str]:
    """In what ``config`` lies outside of what its cluster was calibrated on."""
    record = config.cluster.calibration
    if record is None:
        return []
    parallel, training = config.parallel, config.training
    found = []
    for name, value, span in (
        ("hidden_size", config.model.hidden_size, record.hidden_size),
        ("ranks", parallel.world_size, record.ranks),
        ("micro_batch_size", training.micro_batch_size, record.micro_batch_size),
        ("tensor_parallel_size", parallel.tensor_parallel_size, record.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, record.pipeline_parallel_size),
        ("data_parallel_size", parallel.data_parallel_size, record.data_parallel_size),
    ):
        if span is not None and not span[0] <= value <= span[1]:
            found.append(f"{name} {value} (measured: {span[0]} to {span[1]})")
    fitted = " ".join(record.fitted)
    if "matmul" in fitted and f"matmul_{training.precision}" not in fitted:
        found.append(f"precision {training.precision}")
    return found + _set_since(config.cluster)


def is_calibrated(config: RunConfig) -> bool:
    """Whether predictions of ``config`` rest on measurements of runs like it."""
    return config.cluster.calibration is not None and not outside(config)


def remarks(config: RunConfig) -> Iterator[str]:
    cluster, parallel = config.cluster, config.parallel
    record = cluster.calibration
    if record is None:
        yield (
            f"{cluster.name}: nothing was fitted for it. Links run at what its file says or else at line rate, and its "
            "devices are used as well as A100 were: a direction, not a number."
        )
    else:
        fitted = dict(zip(record.fitted, record.values, strict=False)) or fitted_values(cluster)
        values = ", ".join(f"{key} = {value:g}" for key, value in fitted.items())
        yield f"{cluster.name}: fitted {values}. Source: {record.source}."
        if record.held_out_error_percent is not None:
            yield (
                f"Mean absolute error of that fit: {record.error_percent:g} % on what it saw, "
                f"{record.held_out_error_percent:g} % on what it had not seen ({record.held_out})."
            )
        else:
            yield (
                f"Mean absolute error of that fit: {record.error_percent:g} % on what it saw. Nothing was held out, so "
                "there is no number for what it had not seen."
            )
        if record.at_bound:
            yield (f"At the bound of what the fit allows, so not what it says: {', '.join(record.at_bound)}.")
        far = outside(config)
        where = "inside" if not far else f"outside, in {', '.join(far)}, of"
        yield f"{config.model.name} in {parallel.label} lies {where} the range that was measured."
    if vocabulary_size(config) < _SMALL_VOCABULARY and config.model.hidden_size >= _LARGE_MODEL:
        yield (
            f"The vocabulary has {vocabulary_size(config):,} entries, so logits and embeddings are small; GPT-2's: "
            "tokenizer.vocabulary_size=50257."
        )
    shared = parallel.sequence_parallel or parallel.split_over_tensor_parallel
    if parallel.pipeline_parallel_size > 1 and parallel.tensor_parallel_size > 1 and not shared:
        yield (
            f"{parallel.tensor_parallel_size} tensor-parallel ranks send the same messages: "
            "parallel.split_over_tensor_parallel=true sends each once, as the paper's code did."
        )
