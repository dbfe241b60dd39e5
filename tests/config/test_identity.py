"""A run's identity is what it computes."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import ValidationError

from launchers.plan import plan
from optimus_cc.claims import check_same_experiment, folder_of, write_origin
from optimus_cc.config import RunConfig
from optimus_cc.provenance import CodeVersion
from optimus_cc.runs import RunFolder
from tests.config.command_line import one

NOT_COMPUTED = {
    "task.name",
    "ablation",
    "run",
    "checkpoint",
    "runs_dir",
    "force",
    "technique.name",
    "technique.cb.default_rank",
    "technique.sc.default_rank",
    "model.cb_rank",
    "model.sc_rank",
    "model.sc_warmup_steps",
    "data.cache_dir",
    "training.log_interval",
    "training.device",
    "training.timeout_s",
    "training.on_nonfinite_loss",
    "training.data_workers",
    "optimizer.momentum",  # adam has none
}
GROUPS_NOT_COMPUTED = (
    "cluster.",
    "benchmark.",
    "evaluation.",
    "export.",
    "launcher.",
    "simulation.",
    "tracking.",
    "training.checkpoint.",
    "training.probes.",
)


def changed_once(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``node`` with one leaf changed, for each leaf."""
    hints = get_type_hints(type(node), include_extras=True)
    for field in dataclasses.fields(node):
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            for inner_key, inner in changed_once(value, f"{key}."):
                yield inner_key, dataclasses.replace(node, **{field.name: inner})
            continue
        for other in others(value, hints[field.name]):
            try:
                changed = dataclasses.replace(node, **{field.name: other})
            except ValidationError:
                continue
            yield key, changed
            break


def others(value: Any, hint: Any) -> list[Any]:
    """Candidates for another value of the same type."""
    if get_origin(hint) is Literal:
        return [other for other in get_args(hint) if other != value]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1]
        case float():
            return [value + 0.125, value / 2]
        case str():
            return [f"{value}x"]
        case tuple():
            return [tuple(reversed(value))]
        case None:
            return [3, 0.5, "x"]
    raise TypeError(value)


def test_every_scientific_key_and_no_other_changes_it() -> None:
    config = one("technique=cb_fe_sc parallel=pp4_dp2")
    seen: dict[str, bool] = {key: changed.run_id != config.run_id for key, changed in changed_once(config)}
    assert len(seen) > 60
    assert seen == {key: key not in NOT_COMPUTED and not key.startswith(GROUPS_NOT_COMPUTED) for key in seen}
    assert not NOT_COMPUTED - seen.keys()


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("+ablation=cb", "technique=cb"),
        ("+ablation=baseline", "technique=baseline"),
        ("+ablation=cb_no_epilogue", "technique.cb.epilogue_only=false"),
        ("technique=baseline", "technique=baseline technique.cb.residual=carry"),
        ("technique=baseline", "technique=baseline technique.sc.fraction=0.5 model.sc_warmup_steps=3"),
        ("technique=cb_fe parallel=pp4_dp2", "technique=cb parallel=pp4_dp2 technique.fe.enabled=true"),
        ("", "tracking=wandb runs_dir=/elsewhere launcher.threads_per_rank=2 force=true cluster.ranks_per_node=4"),
        ("", "technique.cb.codec.rank='${model.cb_rank}'"),
        # keys that compute nothing beside the others, and defaults that are said aloud
        ("", "optimizer.momentum=0.5"),
        ("", "model.ffn_hidden_size=512"),
        ("", "optimizer.decay_steps=300"),
        ("optimizer.name=sgd", "optimizer.name=sgd optimizer.beta1=0.5 optimizer.beta2=0.9 optimizer.epsilon=1e-6"),
        (
            "optimizer.decay_style=constant optimizer.warmup_fraction=0",
            "optimizer.decay_style=constant optimizer.warmup_fraction=0 optimizer.min_learning_rate=1e-4 "
            "optimizer.decay_steps=7",
        ),
        *(("", f"task=benchmark benchmark={name}") for name in ("cost", "links", "codecs")),
        ("", "training.probes.error_independence=true training.probes.phases=true training.probes.trace_step=7"),
    ],
)
def test_the_same_computation_is_the_same_run(line: str, same: str) -> None:
    assert one(line).run_id == one(same).run_id


@pytest.mark.parametrize(
    ("line", "run_id"),
    [
        ("", "gpt_tiny-pp4-cb-s1234-3c16c187"),
        ("technique=baseline", "gpt_tiny-pp4-baseline-s1234-89546a18"),
        ("technique=cb_fe_sc parallel=pp4_dp2", "gpt_tiny-pp4_dp2-cb_fe_sc-s1234-85a40462"),
        ("optimizer.name=sgd", "gpt_tiny-pp4-cb-s1234-70ee547e"),
        ("optimizer=paper", "gpt_tiny-pp4-cb-s1234-23a572e7"),
    ],
)
def test_ids_stay(line: str, run_id: str) -> None:
    """Folders of finished runs are found by them."""
    assert one(line).run_ids == (run_id,)


@pytest.mark.parametrize(
    ("line", "before"),
    [
        ("optimizer.momentum=0.5", "gpt_tiny-pp4-cb-s1234-2ea669eb"),
        ("model.ffn_hidden_size=512", "gpt_tiny-pp4-cb-s1234-24f377dc"),
        ("optimizer.decay_steps=300", "gpt_tiny-pp4-cb-s1234-caf2cf58"),
        ("optimizer.name=sgd optimizer.beta1=0.5", "gpt_tiny-pp4-cb-s1234-f5f95fe6"),
    ],
)
def test_a_folder_from_before_is_found(line: str, before: str, tmp_path: Path) -> None:
    """Ids were once made of dead keys too; the values are those that such runs had."""
    config = one(f"{line} runs_dir={tmp_path}")
    assert config.run_ids == (config.run_id, before)
    assert folder_of(config).run_id == config.run_id
    old, new = RunFolder(tmp_path / before), RunFolder(tmp_path / config.run_id)
    for folder in (old, new):
        folder.path.mkdir()
    write_origin(old, config, CodeVersion(None, False), run_id=before, scientific=config._said())
    assert folder_of(config).path == old.path
    check_same_experiment(old, config)  # though it records the keys that are left out now
    (planned,) = plan([old.run_config()])
    assert planned.folder.path == old.path
    write_origin(new, config, CodeVersion(None, False))
    assert folder_of(config).run_id == config.run_id


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("optimizer.name=sgd", "optimizer.momentum=0.5"),
        ("", "optimizer.beta1=0.5"),
        ("", "optimizer.min_learning_rate=1e-4"),
        ("", "model.ffn_hidden_size=513"),
        ("optimizer.decay_style=constant", "optimizer.decay_steps=7"),  # of which warm-up is a share
    ],
)
def test_a_key_that_is_alive_still_counts(line: str, key: str) -> None:
    assert one(line).run_id != one(f"{line} {key}").run_id


def test_other_codec_and_technique_are_other_runs() -> None:
    ids = {one(line).run_id for line in ("", "technique=baseline", "technique.cb.codec.rank=8", "+ablation=cb_naive")}
    assert len(ids) == 4
    techniques = ("baseline", "cb", "fe", "sc", "cb_fe", "cb_fe_sc", "naive_dp")
    labels = {one(f"technique={name} parallel=pp4_dp2").technique.label for name in techniques}
    assert labels == set(techniques)


def test_what_came_later_and_is_off_leaves_no_trace() -> None:
    """Runs from before fused embeddings and stage compression existed keep their ids."""
    science = one("technique=cb").scientific()
    assert science["technique"].keys() == {"cb"}
    assert not any(key.startswith("sc_") for key in science["model"])


def with_corpus(path: Path, extra: str = "") -> RunConfig:
    return one(f"data=jsonl data.path={path} {extra}")


def test_files_count_by_what_they_hold(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "text.jsonl", tmp_path / "b" / "moved.jsonl"
    for path in (first, second):
        path.parent.mkdir()
        path.write_text('{"text": "one"}\n')
    assert with_corpus(first).run_id == with_corpus(second).run_id
    assert with_corpus(first).run_id != with_corpus(first, "data.text_key=body").run_id
    before = with_corpus(first).run_id
    first.write_text('{"text": "two"}\n')
    assert with_corpus(first).run_id != before


def test_weights_count(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n'))
    plain = one(f"data=jsonl data.path=[{path},{path}]")
    weighted = one(f"data=jsonl data.path=[{path},{path}] data.weights=[1,2]")
    assert plain.run_id != weighted.run_id


@pytest.mark.parametrize(
    "line",
    [
        "",
        f"model.name={'m' * 40} training.seed=2147483647",
        f"model.name={'m' * 40} parallel=tp2_pp2_dp2 +ablation=cb_no_epilogue technique.cb.residual=carry",
        f"model.name={'m' * 40} parallel=tp2_pp2_dp2 +ablation=cb_topk technique.cb.residual=carry "
        "technique.cb.codec.match_rank=null technique.cb.codec.density=1e-05 technique.cb.codec.wire_dtype=bf16",
    ],
)
def test_it_names_a_folder(line: str) -> None:
    run_id = one(line).run_id
    assert len(run_id.encode()) < 100
    assert run_id.replace("-", "").replace("_", "").replace(".", "").isalnum()
