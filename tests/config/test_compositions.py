"""Everything in conf/ composes, names each key that there is, and means what it says."""

from __future__ import annotations

import shlex
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from optimus_cc.config import ConfigError, RunConfig, compose, load
from optimus_cc.config.compose import CONF
from tests.config.command_line import composed, one, run_with_checkpoint

ALL_RANKS = "cluster.ranks_per_node=128 training=paper"


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


@cache
def mapping(line: str) -> dict[str, Any]:
    return one(line).to_mapping()


def keys(node: Any, prefix: str = "") -> set[str]:
    if not isinstance(node, dict):
        return {prefix}
    return {key for name, child in node.items() for key in keys(child, f"{prefix}.{name}" if prefix else name)}


def test_defaults() -> None:
    config = one()
    assert (config.model.name, config.parallel.label, config.technique.label) == ("gpt_tiny", "pp4", "cb")
    assert config.ablation is None
    assert config.training.steps == 300


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads"),
    [
        ("gpt_335m", 24, 1024, 16),
        ("gpt_2_5b", 52, 1920, 24),
        ("gpt_8_3b", 72, 3072, 24),
        ("gpt_175b", 96, 12288, 96),
    ],
)
def test_the_papers_models(name: str, layers: int, hidden: int, heads: int) -> None:
    config = one(f"model={name} parallel=tp8_pp4_dp4 optimizer=paper {ALL_RANKS}")
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, hidden, heads)
    assert model.sequence_length == 1024
    assert mapping(f"model={name} parallel=pp4 {ALL_RANKS}")["technique"]["cb"]["codec"]["rank"] == 16
    assert config.num_microbatches == 16
    billions = float(name.removeprefix("gpt_").rstrip("bm").replace("_", "."))
    billions = billions / 1000 if name.endswith("m") else billions
    assert model.num_parameters(50257) / 1e9 == pytest.approx(billions, rel=0.08)


ILL_FITTING = {
    *product(["gpt_tiny"], ["pp4_v2", "tp8_pp4_dp4", "tp8_pp2_dp8", "tp8_pp8_dp2", "tp4_pp8_dp4"]),
    *product(["gpt_2_5b"], ["pp4_v2", "tp8_pp8_dp2", "tp4_pp8_dp4"]),
}


@pytest.mark.parametrize(("model", "layout"), [*product(options("model"), options("parallel"))])
def test_models_and_layouts(model: str, layout: str) -> None:
    shape = mapping(f"model={model} technique=baseline parallel=single {ALL_RANKS}")
    ranks = mapping(f"model=gpt_175b technique=baseline parallel={layout} {ALL_RANKS}")
    stages = ranks["parallel"]["pipeline_parallel_size"] * ranks["parallel"]["num_chunks"]
    technique = mapping(f"technique={'cb' if stages > 1 else 'baseline'} parallel={'pp4' if stages > 1 else 'single'}")
    whole = {**ranks, "model": shape["model"], "technique": technique["technique"]}
    if (model, layout) in ILL_FITTING:
        with pytest.raises(ConfigError, match="multiple of parallel"):
            load(whole)
    else:
        assert load(whole).parallel.label == layout


@pytest.mark.parametrize(
    ("name", "lazy", "epilogue", "forward"),
    [
        ("cb", True, True, False),
        ("cb_no_epilogue", True, False, False),
        ("cb_no_lazy_error", False, True, False),
        ("cb_naive", False, False, False),
        ("cb_forward", True, True, True),
    ],
)
def test_ablations(name: str, lazy: bool, epilogue: bool, forward: bool) -> None:
    config = one(f"+ablation={name}")
    cb = config.technique.cb
    assert config.ablation == config.technique.label == name
    assert cb.enabled
    assert (cb.lazy_error_propagation, cb.epilogue_only, cb.compress_forward) == (lazy, epilogue, forward)
    assert cb.codec.name == "low_rank"
    if forward:
        assert any("diverge" in notice for notice in config.notices())


def test_the_baseline_ablation() -> None:
    config = one("+ablation=baseline")
    assert config.technique == one("technique=baseline").technique
    assert not config.technique.cb.enabled
    assert config.technique.cb.codec.name == "identity"


@pytest.mark.parametrize(
    ("name", "cb", "fe", "sc"),
    [
        ("baseline", False, False, False),
        ("cb", True, False, False),
        ("fe", False, True, False),
        ("sc", False, False, True),
        ("naive_dp", False, False, True),
        ("cb_fe", True, True, False),
        ("cb_fe_sc", True, True, True),
    ],
)
def test_techniques(name: str, cb: bool, fe: bool, sc: bool) -> None:
    technique = one(f"technique={name} parallel=tp2_pp2_dp2").technique
    assert technique.name == technique.label == name
    assert (technique.cb.enabled, technique.fe.enabled, technique.sc.enabled) == (cb, fe, sc)
    for node, enabled in ((technique.cb, cb), (technique.sc, sc)):
        assert (node.codec.name == "low_rank") == enabled
    if sc:
        naive = name == "naive_dp"
        assert (technique.sc.fraction, technique.sc.warmup_steps) == ((1.0, 0) if naive else (0.75, 20))
    papers = mapping(f"model=gpt_8_3b technique=cb_fe_sc parallel=tp8_pp4_dp4 optimizer=paper {ALL_RANKS}")["technique"]
    assert (papers["sc"]["codec"]["rank"], papers["sc"]["warmup_steps"]) == (128, 30000)


def test_every_technique_is_tested_here() -> None:
    here = ["baseline", "cb", "fe", "sc", "naive_dp", "cb_fe", "cb_fe_sc"]
    # cb_topk is an ablation's technique too: test_ablations.
    assert options("technique") == sorted([*here, "cb_topk"])
    assert one("technique=cb_topk parallel=tp2_pp2_dp2").technique.cb.codec.name == "top_k"


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("technique=cb_fe", "nothing is saved"),
        ("technique=sc technique.sc.fraction=0 parallel=pp4_dp2", "no stage compresses"),
    ],
)
def test_what_saves_nothing_but_does_no_harm_is_said(line: str, notice: str) -> None:
    assert any(notice in said for said in one(line).notices())


OTHER_ABLATIONS: dict[str, dict[str, Any]] = {
    "carry": {"residual": "carry"},
    "flush": {"residual": "flush"},
    "cold_start": {"codec": {"name": "low_rank", "rank": 4, "warm_start": False, "wire_dtype": "input"}},
    "topk": {"codec": {"name": "top_k", "density": None, "match_rank": 4, "wire_dtype": "input"}},
}

TOP_K = {"name": "top_k", "match_rank": 4, "density": None, "rank": None, "warm_start": None}
DIFFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    # what it is laid on, and all that is different then; None: no such key
    "baseline": ("technique=baseline", {}),
    "cb": ("technique=cb", {}),
    "cb_carry": ("+ablation=cb", {"cb.residual": "carry"}),
    "cb_cold_start": ("+ablation=cb", {"cb.codec.warm_start": False}),
    "cb_fe": ("technique=cb_fe", {}),
    "cb_fe_sc": ("technique=cb_fe_sc", {}),
    "cb_flush": ("+ablation=cb", {"cb.residual": "flush"}),
    "cb_forward": ("+ablation=cb", {"cb.compress_forward": True}),
    "cb_naive": ("+ablation=cb", {"cb.epilogue_only": False, "cb.lazy_error_propagation": False}),
    "cb_no_epilogue": ("+ablation=cb", {"cb.epilogue_only": False}),
    "cb_no_lazy_error": ("+ablation=cb", {"cb.lazy_error_propagation": False}),
    "cb_topk": ("+ablation=cb", {"name": "cb_topk", **{f"cb.codec.{key}": value for key, value in TOP_K.items()}}),
    "naive_dp": ("technique=naive_dp", {}),
    "sc_fraction_100": ("+ablation=cb_fe_sc", {"sc.fraction": 1.0}),
    "sc_fraction_25": ("+ablation=cb_fe_sc", {"sc.fraction": 0.25}),
    "sc_fraction_50": ("+ablation=cb_fe_sc", {"sc.fraction": 0.5}),
    "sc_rank_double": ("+ablation=cb_fe_sc", {"sc.codec.rank": 16}),
    "sc_rank_half": ("+ablation=cb_fe_sc", {"sc.codec.rank": 4}),
}


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    return {key: leaf for name, child in node.items() for key, leaf in leaves(child, f"{prefix}.{name}").items()}


def test_every_ablation_is_tested_here() -> None:
    assert options("ablation") == sorted(DIFFERENCES)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_ablation_differs_from_its_base_in_what_it_names(name: str) -> None:
    base, different = DIFFERENCES[name]
    before, after = (leaves(mapping(f"{said} parallel=pp4_dp2")) for said in (base, f"+ablation={name}"))
    changed = {key: after.get(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    expected = {f".technique.{key}": value for key, value in different.items() if value is not None}
    gone = {f".technique.{key}" for key, value in different.items() if value is None and f".technique.{key}" in before}
    assert changed == {".ablation": name, **expected, **dict.fromkeys(gone)}


@pytest.mark.parametrize("name", ["cb_fe_sc", "naive_dp", *(name for name in DIFFERENCES if name.startswith("sc_"))])
def test_ablations_of_gradients_need_data_parallel_ranks(name: str) -> None:
    with pytest.raises(ConfigError, match="parallel=pp4_dp2"):
        one(f"+ablation={name}")


def test_ablations_of_the_rank_follow_the_model() -> None:
    papers = f"model=gpt_8_3b parallel=tp8_pp4_dp4 {ALL_RANKS}"
    ranks = [one(f"+ablation=sc_rank_{name} {papers}").to_mapping()["technique"]["sc"] for name in ("half", "double")]
    assert [(sc["codec"]["rank"], sc["default_rank"]) for sc in ranks] == [(64, 128), (256, 128)]
    with pytest.raises(ConfigError, match="64, which ablation=sc_rank_half is about"):
        one(f"+ablation=sc_rank_half technique.sc.codec.rank=32 {papers}")
    assert mapping("+ablation=sc_rank_half model.sc_rank=1 parallel=pp4_dp2")["technique"]["sc"]["codec"]["rank"] == 1


@pytest.mark.parametrize("name", OTHER_ABLATIONS)
def test_ablations_of_codec_and_residual(name: str) -> None:
    config = one(f"+ablation=cb_{name}")
    assert config.ablation == config.technique.label == f"cb_{name}"
    assert config.to_mapping()["technique"]["cb"] == {
        **mapping("+ablation=cb")["technique"]["cb"],
        **OTHER_ABLATIONS[name],
    }
    assert config.notices() == []


def test_top_k_takes_the_size_of_the_models_rank() -> None:
    top_k, low_rank = one("technique=cb_topk"), one("technique=cb")
    assert 0 <= low_rank.compressed_message_nbytes - top_k.compressed_message_nbytes < 6
    assert mapping("technique=cb_topk model=gpt_8_3b parallel=pp4")["technique"]["cb"]["codec"]["match_rank"] == 16
    half = one("technique=cb_topk technique.cb.codec.match_rank=null technique.cb.codec.density=0.5")
    assert half.compressed_message_nbytes == half.message_nbytes // 4 // 2 * 6
    assert half.notices() == []


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("technique=cb technique.cb.codec.wire_dtype=bf16", "cb_bf16_wire"),
        ("technique=cb_topk technique.cb.residual=carry", "cb_topk_carry"),
        ("technique=cb_topk technique.cb.codec.match_rank=null technique.cb.codec.density=0.01", "cb_topk_0.01"),
        ("+ablation=cb_naive technique.cb.codec.warm_start=false", "cb_cold_start_naive"),
        ("codec@technique.cb.codec=top_k", "cb_topk"),
    ],
)
def test_labels_name_what_differs(line: str, label: str) -> None:
    assert one(line).technique.label == label


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("technique.cb.codec.rank=64", "rank=64"),
        ("technique.cb.codec.rank=1000", "rank=1000"),
        ("technique=cb_topk technique.cb.codec.match_rank=64", "match_rank=64"),
        ("technique=cb_topk technique.cb.codec.match_rank=null technique.cb.codec.density=0.7", "density=0.7"),
    ],
)
def test_a_codec_that_saves_nothing_is_told(line: str, size: str) -> None:
    """Messages of gpt_tiny are 256 x 128: factors are no smaller from a rank of 86 on."""
    saves = "rank=64" in size
    assert any(size in notice and "nothing is saved" in notice for notice in one(line).notices()) is not saves


@pytest.mark.parametrize("line", ["technique.cb.residual=carry", "technique.cb.codec.rank=8", "technique=cb"])
def test_what_an_ablation_is_not_about_stays_free(line: str) -> None:
    assert one(f"+ablation=cb_no_epilogue {line}").ablation == "cb_no_epilogue"


def test_the_rank_is_the_models_unless_it_is_set() -> None:
    assert mapping("")["technique"]["cb"]["codec"]["rank"] == one().model.cb_rank
    assert mapping("technique.cb.codec.rank=8 parallel=tp2_pp2_dp2")["technique"]["cb"]["codec"]["rank"] == 8
    assert mapping("model.cb_rank=3")["technique"]["cb"]["codec"]["rank"] == 3


@pytest.mark.parametrize("group", sorted(path.name for path in CONF.iterdir() if path.is_dir()))
def test_options_name_every_key(group: str, tmp_path: Path) -> None:
    """A key that no file names could only be set with a plus."""
    corpus = tmp_path / "text.jsonl"
    corpus.write_text('{"text": "a"}\n')
    (tmp_path / "tokenizer.json").write_text("{}")
    run = run_with_checkpoint(tmp_path)
    needs = {
        "data=jsonl": f"data.path={corpus}",
        "tokenizer=gpt2": f"tokenizer.vocab_file={corpus} tokenizer.merges_file={corpus}",
        "tokenizer=huggingface": f"tokenizer.path={tmp_path}",
        **{f"cluster={name}": "cluster.num_nodes=1" for name in options("cluster")},
        "technique=baseline": "parallel=single",
        **{f"technique={name}": "parallel=pp4_dp2" for name in ("sc", "cb_fe_sc", "naive_dp")},
        **{f"ablation={name}": "parallel=pp4_dp2" for name in DIFFERENCES if name.startswith("sc_")},
        **{f"ablation={name}": "parallel=pp4_dp2" for name in ("cb_fe_sc", "naive_dp")},
        "codec=identity": "technique.cb.enabled=false",
        "task=benchmark": "benchmark=cost",
        "task=simulate": "cluster=a100_hdr200",
        "task=calibrate": f"cluster=a100_hdr200 simulation.measured={corpus}",
        **{f"task={name}": f"runs_dir={tmp_path} run={run}" for name in ("evaluate", "export")},
        **{f"benchmark={name}": "task=benchmark" for name in ("cost", "links", "codecs")},
        **{f"experiment={name}": "launcher.dry_run=true" for name in options("experiment")},
        "experiment=figure_codec_throughput": "",
    }
    for option in options(group):
        choice = f"{group}={option}"
        said = {"ablation": f"+{choice}", "codec": f"codec@technique.cb.codec={option}"}.get(group, choice)
        if group == "parallel":
            said += " technique=baseline model.num_layers=8 model.num_attention_heads=8 training=paper"
        arguments, _ = compose.parse(shlex.split(f"{said} {needs.get(choice, '')} cluster.ranks_per_node=128"))
        composer = compose._Composer.of(arguments)
        config = composer.run(composer.overrides, None)
        written = keys(compose.plain(composer.load(composer.overrides)))
        unused = {"tracking.project", "tracking.mode"} if config.tracking.name == "none" else set()
        assert written == keys(config.to_mapping()) - unused, choice


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONF)))
def test_files_say_what_they_are(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# ")


@pytest.mark.parametrize("line", ["", "+ablation=baseline", "parallel=tp2_pp2_dp2 model.ffn_hidden_size=96"])
def test_a_frozen_configuration_reads_back_the_same(line: str) -> None:
    config = one(line)
    frozen = config.to_mapping()
    assert load(frozen) == config
    assert load(frozen).to_mapping() == frozen
    assert load(frozen).run_id == config.run_id


def test_a_sweep_is_every_combination() -> None:
    runs: list[RunConfig] = composed("-m +ablation=baseline,cb training.seed=1,2")
    assert [(run.ablation, run.training.seed) for run in runs] == [
        ("baseline", 1),
        ("baseline", 2),
        ("cb", 1),
        ("cb", 2),
    ]


def test_flags_and_overrides_may_be_mixed() -> None:
    assert len(composed("training.steps=40 -m training.seed=1,2 parallel=pp2")) == 2


def test_options_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [gpt_tiny, _self_]\nname: mine\nhidden_size: 64\n")
    assert one(f"--config-dir {tmp_path} model=mine").model.hidden_size == 64
