"""Whatever is wrong with the input: one ConfigError that names the key, the value, what is allowed and what to type."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from optimus_cc.config import ConfigError, Problem
from optimus_cc.config.compose import _Composer, parse
from optimus_cc.config.sweeps import Composing, _size
from tests.config.command_line import composed, composed_once
from tests.config.fixes import failing

WRONG: list[tuple[str, str, str]] = [
    # what was typed, the key that is named, what the text must hold
    # keys and options that don't exist
    ("technique.cb.codec.rnk=8", "technique.cb.codec.rnk", "did you mean technique.cb.codec.rank?"),
    ("trainng.steps=3", "trainng.steps", "did you mean training.steps?"),
    ("steps=100", "steps", "did you mean training.steps?"),
    ("num_layer=8", "num_layer", "did you mean model.num_layers?"),
    ("modle=gpt_mini", "modle", "did you mean model?"),
    ("model.depth.layers=8", "model.depth.layers", "an existing key"),
    ("+training.stepz=3", "training.stepz", "did you mean training.steps?"),
    ("experiment=all", "experiment", "laptop/table_pretraining"),
    ("model=gpt_tyni", "model", "did you mean model=gpt_tiny?"),
    ("model=", "model", "one of gpt_175b, gpt_2_5b, gpt_335m, gpt_8_3b, gpt_mini, gpt_tiny"),
    ("model=null", "model", "one of gpt_175b"),
    ("+ablation=cb_naiv", "ablation", "did you mean +ablation=cb_naive"),
    ("codec@technique.cb.codec=lowrank", "codec@technique.cb.codec", "codec@technique.cb.codec=low_rank"),
    ("task=trian", "task", "task=train"),
    ("task.name=trian", "task.name", "one of train"),
    ("data.path=corpus.jsonl", "data.path", "fix:     data=jsonl, which has it"),
    ("technique=baseline technique.cb.codec.rank=8", "technique.cb.codec.rank", "codec@technique.cb.codec=low_rank"),
    ("tracking.mode=online", "tracking.mode", "fix:     tracking=wandb, which has it"),
    ("hydra/launcher=slurm", "hydra/launcher", "one of basic"),
    ("hydra.nope=1", "hydra.nope", "not in 'HydraConf'"),
    ("-m 'hydra.sweeper.params={training.seed: 1}'", "hydra.sweeper.params", "Hydra says"),
    ("a@b=c", "a@b", "an existing key"),
    # texts that look like numbers, names that can't be written down, homes that aren't there
    ("data=jsonl data.path=pyproject.toml data.label=1e3", "data.label", "fix:     'data.label=\"1e3\"'"),
    ("data=jsonl data.path=pyproject.toml data.label=695e0514", "data.label", "fix:     'data.label=\"695e0514\"'"),
    ("launcher=slurm launcher.setup=[1e3,ls]", "launcher.setup", "fix:     'launcher.setup=[\"1e3\",ls]'"),
    ("data=jsonl data.path=caf\udce9", "data.path", "caf\\xe9"),
    ("data=jsonl 'data.path=\"caf\udce9\"'", "data.path", "UTF-8"),
    ("\"runs_dir='~nobody_is_called_so/x'\"", "runs_dir", "./~nobody_is_called_so/x"),
    # options and keys that are said in the wrong way
    ("ablation=cb", "ablation", "fix:     +ablation=cb"),
    ("++ablation=cb", "ablation", "fix:     +ablation=cb"),
    ("+model=gpt_mini", "+model", "fix:     model=gpt_mini"),
    ("+training.steps=3", "+training.steps", "fix:     training.steps=3"),
    ("~model", "command line", "leave ~model out"),
    ("~model=gpt_tiny", "command line", "leave ~model=gpt_tiny out"),
    ("codec=low_rank", "codec", "codec@technique.cb.codec=low_rank"),
    ("codec@technique.cb=low_rank", "codec@technique.cb", "codec@technique.cb.codec=low_rank"),
    ("technique.cb.codec=low_rank", "technique.cb.codec", "codec@technique.cb.codec=low_rank"),
    ("technique.cb.codec=none", "technique.cb.codec", "identity, low_rank"),
    ("model.name=gpt_mini", "model.name", "fix:     model=gpt_mini"),
    ("data.name=jsonl", "data.name", "fix:     data=jsonl"),
    ("technique.cb=true", "technique.cb", "technique.cb.KEY=VALUE"),
    # benchmarks
    ("task=benchmark", "benchmark", "fix:     benchmark=cost"),
    ("benchmark=links", "benchmark", "fix:     task=benchmark"),
    (
        "task=benchmark benchmark=cost benchmark.measure=[cb,fee]",
        "benchmark.measure",
        "fix:     benchmark.measure=[cb,fe]",
    ),
    ("task=benchmark benchmark=cost benchmark.measure=[sc]", "benchmark.measure", "more than one data-parallel rank"),
    ("task=benchmark benchmark=links benchmark.max_bytes=2000", "benchmark.max_bytes", "at least"),
    ("task=benchmark benchmark=links parallel=single technique=baseline", "parallel", "more than one rank"),
    ("task=benchmark benchmark=links benchmark.cluster_file=pyproject.toml", "benchmark.cluster_file", "NAME.yaml"),
    ("task=benchmark benchmark=links benchmark.cluster_file=no/a.yaml", "benchmark.cluster_file", "mkdir -p no"),
    ("task=benchmark benchmark=codecs benchmark.ranks=[]", "benchmark.ranks", "a list of at least 1"),
    # syntax
    ("model", "command line", "fix:     model=OPTION with one of gpt_175b"),
    ("model==gpt_mini", "command line", "fix:     model=gpt_mini"),
    ("=3", "command line", "KEY=VALUE"),
    ("training.steps=[3", "command line", "fix:     training.steps=3"),
    ("training.steps=[1,2", "command line", "closed brackets"),
    ("--model=gpt_mini", "command line", "fix:     model=gpt_mini"),
    ("--cfg everything", "command line", "'job', 'hydra', 'all'"),
    ("--config-path=/tmp", "--config-path", "--config-dir"),
    ("--config-dir=/nowhere", "--config-dir", "a folder"),
    ("--config-name=mine", "--config-name", "one of config"),
    ("-cn nope model=gpt_mini", "--config-name", "leave it out"),
    ("-cn '' model=gpt_mini", "--config-name", "leave it out"),
    ("-cn confg", "--config-name", "leave it out"),
    ("--ablation=1", "command line", "fix:     +ablation=OPTION with one of baseline"),
    ("--ablation=cb_naiv", "command line", "fix:     +ablation=cb_naive"),
    ("--ablation cb", "command line", "fix:     +ablation=cb"),
    ("--training.steps 3", "command line", "fix:     training.steps=3"),
    ("--seed 3", "command line", "fix:     training.seed=3"),
    ("--dry-run", "command line", "fix:     launcher.dry_run=true"),
    ("-x", "command line", "--help"),
    ("~~training.steps=3", "command line", "fix:     training.steps=3"),
    ("+++training.steps=3", "command line", "fix:     training.steps=3"),
    ("model = gpt_mini", "command line", "fix:     model=gpt_mini"),
    ("training.steps= 3", "command line", "fix:     training.steps=3"),
    ("training.steps =3", "command line", "without spaces"),
    ("training.steps 3", "command line", "fix:     training.steps=3"),
    ("'training.steps = 3'", "command line", "fix:     training.steps=3"),
    ("training.steps:3", "command line", "fix:     training.steps=3"),
    ("training.steps=3,", "command line", "fix:     training.steps=3"),
    ("data.split=(0.9,0.05,0.05)", "command line", "fix:     'data.split=[0.9,0.05,0.05]'"),
    ("runs_dir=a=b", "command line", "fix:     'runs_dir=\"a=b\"'"),
    ("launcher=slurm launcher.srun=[--cpu-bind=none]", "command line", 'launcher.srun=["--cpu-bind=none"]'),
    ("gpt_mini", "command line", "fix:     model=gpt_mini"),
    ("cb", "command line", "fix:     technique=cb or +ablation=cb"),
    ("training,steps=3", "command line", "fix:     training.steps=3"),
    ("training/steps=3", "training/steps", "did you mean training.steps?"),
    ("TRAINING.STEPS=3", "TRAINING.STEPS", "did you mean training.steps?"),
    ("training.steps.first=3", "training.steps.first", "did you mean training.steps?"),
    ("launcher.partition=short", "launcher.partition", "fix:     launcher=slurm, which has it"),
    ("hydra.searchpath=[file:///nowhere]", "hydra.searchpath", "/nowhere is not available"),
    ("hydra.mode=TWICE", "hydra.mode", "TWICE"),
    ("training.seed=1,2", "training.seed", "python run.py -m training.seed=1,2"),
    ("model=gpt_tiny,gpt_mini", "model", "python run.py -m model=gpt_tiny,gpt_mini"),
    ("-m 'training.seed=interval(1,2)'", "training.seed", "fix:     training.seed=1,2"),
    ("X=interval(0,1)", "X", "an existing key"),
    ("-m 'X=interval(0,1)'", "X", "an existing key"),
    ("training.steps=interval(0,1)", "training.steps", "one value"),
    (
        "optimizer.learning_rate=interval(1e-4,3e-4)",
        "optimizer.learning_rate",
        "learning_rate=0.0001,0.0003 for a sweep",
    ),
    ("training.steps=1,000", "training.steps", "fix:     training.steps=1000"),
    ("data.split=0.9,0.05,0.05", "data.split", "fix:     'data.split=[0.9,0.05,0.05]'"),
    ("+ablation=cb,cb_fe", "+ablation", "python run.py -m +ablation=cb,cb_fe"),
    ("ablation=cb,cb_fe", "ablation", "python run.py -m +ablation=cb,cb_fe"),
    ("+training.seeds=1,2", "training.seeds", "did you mean training.seed"),
    ("-m hydra.sweeper.max_batch_size=0", "hydra.sweeper.max_batch_size", "at least 1"),
    # more than one option
    ("+ablation=cb +ablation=cb_fe", "+ablation", "python run.py -m +ablation=cb,cb_fe"),
    ("+ablation=cb +ablation=cb", "+ablation", "fix:     +ablation=cb"),
    ("+ablation=[cb,cb_fe]", "+ablation", "python run.py -m +ablation=cb,cb_fe"),
    ("-m +ablation=[cb],[cb_fe]", "+ablation", "fix:     +ablation=cb"),
    ("technique=[cb,fe]", "technique", "fix:     technique=cb"),
    ("experiment=[laptop/figure_memory,laptop/figure_layouts]", "experiment", "one option"),
    # deletions
    ("~training.resume_from=x", "~training.resume_from", "leave ~training.resume_from=x out"),
    ("~training.resume_from", "~training.resume_from", "not deleted"),
    ("~training.steps=3", "~training.steps", "leave ~training.steps=3 out"),
    ("~nothing", "nothing", "an existing key"),
    # values that are missing or of the wrong type
    ("data=jsonl", "data.path", "data.path is not set"),
    ("tokenizer=gpt2", "tokenizer.vocab_file", "tokenizer.merges_file is not set"),
    ("~training.steps", "training.steps", "is not set"),
    ("training.steps=many", "training.steps", "a whole number"),
    ("training.steps=3.5", "training.steps", "a whole number"),
    ("training.steps=null", "training.steps", "a whole number"),
    ("training.steps=0", "training.steps", "at least 1"),
    ("training.seed=-1", "training.seed", "at least 0"),
    ("training.precision=fp16", "training.precision", "fp32 or bf16"),
    ("optimizer.name=adamw", "optimizer.name", "did you mean optimizer.name=adam?"),
    ("optimizer.learning_rate=fast", "optimizer.learning_rate", "a number"),
    ("optimizer.learning_rate=nan", "optimizer.learning_rate", "a finite number"),
    ("optimizer.learning_rate=-1", "optimizer.learning_rate", "above 0"),
    ("model.dropout=1.5", "model.dropout", "below 1"),
    ("force=maybe", "force", "true or false"),
    ("technique.cb.enabled=1", "technique.cb.enabled", "true or false"),
    ("technique.cb.codec.rank=0", "technique.cb.codec.rank", "at least 1"),
    ("technique.cb.residual=drop", "technique.cb.residual", "carry, reset or flush"),
    ("data.split=0.9", "data.split", "a list"),
    ("data.split=[0.9,0.1]", "data.split", "at least 3 values"),
    ("model.name='a b/c'", "model.name", "letters, digits"),
    ("runs_dir=3", "runs_dir", "text"),
    ("technique.fe=[]", "technique.fe", "the keys technique.fe.KEY=VALUE"),
    ("technique.sc.codec=[[1]]", "technique.sc.codec", "codec@technique.sc.codec=OPTION"),
    ("technique.cb.codec=null", "technique.cb.codec", "fix:     codec@technique.cb.codec=low_rank"),
    ("data.split={a:1}", "data.split", "a list"),
    ("data=jsonl data.path={a:b}", "data.path", "text or a list"),
    ("training.steps='\"3\"'", "training.steps", 'training.steps = "3"'),
    ("training.steps='\"3\"'", "training.steps", "fix:     training.steps=3, without inner quotes"),
    ("training.steps=1e3", "training.steps", "fix:     training.steps=1000"),
    ("optimizer.learning_rate='\"1e-4\"'", "optimizer.learning_rate", "fix:     optimizer.learning_rate=1e-4"),
    ("data.split='\"[0.9,0.05,0.05]\"'", "data.split", "fix:     'data.split=[0.9,0.05,0.05]'"),
    ("force=yes", "force", "fix:     force=true"),
    ("force='\"false\"'", "force", 'force = "false"'),
    ("technique.cb.codec.name=topk", "technique.cb.codec.name", "fix:     codec@technique.cb.codec=top_k"),
    ("data.name=jsnol", "data.name", "fix:     data=jsonl"),
    ("runs_dir='${hydra.runtime.cwd}/x'", "runs_dir", "fix:     'runs_dir=${hydra:runtime.cwd}/x'"),
    ("runs_dir='${HOME}/x'", "runs_dir", "fix:     'runs_dir=${oc.env:HOME}/x'"),
    ("training.steps='${times:a,b}'", "training.steps", "a value"),
    ("'model.hidden_size=${model.width}'", "model.hidden_size", "model.width"),
    # files that aren't there
    ("data=jsonl data.path=/nowhere.jsonl", "data.path", "/nowhere.jsonl"),
    ("data=jsonl data.path=[/a.jsonl,/b.jsonl] data.weights=[1]", "data.weights", "as many weights as files"),
    ("tokenizer=gpt2 tokenizer.vocab_file=/a tokenizer.merges_file=/b", "tokenizer.merges_file", "an existing file"),
    ("tokenizer=huggingface tokenizer.path=/nowhere", "tokenizer.path", "tokenizer.json"),
    # combinations that can't work
    ("data.split=[0.9,0.2,0.1]", "data.split", "sum to 1"),
    ("model.num_layers=6", "model.num_layers", "fix:     model.num_layers=8"),
    ("parallel=pp4_v2", "model.num_layers", "num_chunks = 8"),
    ("model.num_attention_heads=3", "model.num_attention_heads", "a divisor of model.hidden_size = 128"),
    (
        "parallel=tp2 technique=baseline model.num_attention_heads=1",
        "model.num_attention_heads",
        "tensor_parallel_size",
    ),
    ("parallel.tensor_parallel_size=3", "parallel.tensor_parallel_size", "power of two"),
    ("parallel=pp4_dp2 cluster.ranks_per_node=4", "parallel", "at most 4 ranks"),
    ("cluster=a100_hdr200", "cluster.num_nodes", "cluster=local"),
    (
        "training.micro_batch_size=4 training.global_batch_size=30",
        "training.global_batch_size",
        "fix:     training.global_batch_size=32",
    ),
    (
        "model=gpt_mini parallel=pp4_v2 training.micro_batch_size=4 training.global_batch_size=24",
        "training.global_batch_size",
        "interleaved",
    ),
    ("parallel=pp2_v2 parallel.overlap_p2p=false parallel.batch_p2p=true", "parallel.overlap_p2p", "overlap_p2p=true"),
    ("parallel=pp2_v2 parallel.batch_p2p=true", "parallel.batch_p2p", "parallel.batch_p2p=false"),
    ("parallel.overlap_p2p=true parallel.batch_p2p=false", "parallel.overlap_p2p", "num_chunks"),
    ("parallel=single technique=baseline parallel.num_chunks=2", "parallel.num_chunks", "pipeline_parallel_size = 1"),
    ("optimizer.min_learning_rate=1", "optimizer.min_learning_rate", "at most optimizer.learning_rate"),
    ("optimizer.warmup_fraction=1.0", "optimizer.warmup_fraction", "below 1.0"),
    # what Megatron-core would refuse in a rank
    ("optimizer.name=sgd parallel.distributed_optimizer=true", "parallel.distributed_optimizer", "optimizer.name=adam"),
    (
        "model.position_embedding=rope model.hidden_size=6 model.num_attention_heads=2",
        "model.position_embedding",
        "fix:     model.hidden_size=12",
    ),
    # what the integers, floats and clocks below can't hold
    (f"training.steps={10**30}", "training.steps", "at most 2147483647"),
    (f"training.global_batch_size={10**30}", "training.global_batch_size", "at most 2147483647"),
    (f"model.hidden_size={2**63}", "model.hidden_size", "at most 2147483647"),
    ("training.steps=2147483647", "training.steps", "fix:     training.steps=134217727"),
    ("training.validation_batches=2147483647", "training.validation_batches", "at most 2,147,483,647 samples"),
    (
        "training.global_batch_size=2147483646 training.micro_batch_size=1 training.steps=1 "
        "training.validation_batches=1",
        "training.micro_batch_size",
        "at most 1,000,000 forward passes",
    ),
    ("training.timeout_s=1e300", "training.timeout_s", "at most 31622400"),
    ("training.timeout_s=1e-9", "training.timeout_s", "at least 1"),
    ("launcher.stop_grace_s=1e300", "launcher.stop_grace_s", "at most 31622400"),
    ("launcher.time_limit_h=1e300", "launcher.time_limit_h", "at most 8784"),
    ("launcher.threads_per_rank=1000000", "launcher.threads_per_rank", "at most 1024"),
    ("launcher=slurm launcher.save_before_end_s=65536", "launcher.save_before_end_s", "at most 65535"),
    ("training.data_workers=1000000", "training.data_workers", "at most 1024"),
    ("cluster.ranks_per_node=1000000", "cluster.ranks_per_node", "at most 1024"),
    ("optimizer.learning_rate=1e300", "optimizer.learning_rate", "at most 1e+16"),
    ("optimizer.epsilon=1e-300", "optimizer.epsilon", "at least 1e-30"),
    ("model.layernorm_epsilon=1e-300", "model.layernorm_epsilon", "at least 1e-12"),
    ("data=jsonl data.path=[/a] data.weights=[1e-300]", "data.weights", "at least 1e-09"),
    # sweeps of no runs, and of too many
    ("-m 'parallel=glob(nope*)'", "parallel", "there would be no run"),
    ("-m 'training.steps=range(4,1)'", "training.steps", "there would be no run"),
    ("hydra.mode=MULTIRUN 'training.steps=range(4,1)' training.seed=1,2", "training.steps", "there would be no run"),
    ("-m 'training.seed=range(1,100000000)'", "training.seed", "at most 10,000 runs in a sweep"),
    ("-m 'training.seed=shuffle(range(1,1e30))'", "training.seed", "at most 10,000 runs in a sweep"),
    ("-m 'training.seed=range(1,4,0)'", "training.seed", "no end"),
    ("-m 'training.seed=range(0,200)' 'model.dropout=range(0,0.8,0.01)'", "training.seed", "200 x 80 = 16,000"),
    # Hydra's own keys and flags, before it meets them itself
    ("hydra.verbose=0", "hydra.verbose", "names of loggers"),
    ("hydra.verbose=null", "hydra.verbose", "names of loggers"),
    ("'hydra.run.dir=${times:a,b}'", "hydra.run.dir", "multiply"),
    ("-m 'hydra.sweep.subdir=${times:a,b}'", "hydra.sweep.subdir", "multiply"),
    ("-m 'hydra.sweep.dir=${model.nope}'", "hydra.sweep.dir", "model.nope"),
    ("'hydra.output_subdir=${nope}'", "hydra.output_subdir", "nope"),
    ("'+hydra.job.env_set.A=${oc.env:NOT_SET_ANYWHERE}'", "hydra.job.env_set.A", "NOT_SET_ANYWHERE"),
    ("hydra.job.env_copy=[NOT_SET_ANYWHERE]", "hydra.job.env_copy", "no environment variable NOT_SET_ANYWHERE"),
    ("-m hydra.sweeper.max_batch_size=0", "hydra.sweeper.max_batch_size", "at least 1"),
    ("-m hydra.launcher._target_=nope.X", "hydra.launcher._target_", "a launcher that is installed"),
    ("hydra.run.dir=/dev/null/x", "hydra.run.dir", "a folder that can be made"),
    ("-m hydra.sweep.dir=/dev/null/x", "hydra.sweep.dir", "a folder that can be made"),
    ("-m hydra.output_subdir=/dev/null/x", "hydra.output_subdir", "a folder that can be made"),
    ("-cn ''", "--config-name", "leave it out"),
    ("--package model", "--package", "--cfg job"),
    ("-sc query=bash", "--shell-completion", "install=bash"),
    # techniques that do nothing, or not what was said
    ("parallel=single", "technique.cb.enabled", "technique=baseline"),
    ("codec@technique.cb.codec=identity", "technique.cb.codec", "a codec that compresses"),
    ("parallel=pp2 technique.cb.residual=flush", "technique.cb.residual", "technique.cb.residual=reset"),
    ("technique=fe parallel=dp2", "technique.fe.enabled", "more than one pipeline stage"),
    ("technique=fe model.tied_embeddings=false", "technique.fe.enabled", "tied_embeddings = true"),
    ("technique=sc", "technique.sc.enabled", "more than one data-parallel rank"),
    (
        "technique=sc parallel=pp4_dp2 codec@technique.sc.codec=identity",
        "technique.sc.codec",
        "codec@technique.sc.codec=low_rank",
    ),
    ("technique=sc parallel=pp4_dp2 technique.sc.fraction=0.1", "technique.sc.fraction", "technique.sc.fraction=0.25"),
    ("technique=sc parallel=pp4_dp2 technique.sc.fraction=1.5", "technique.sc.fraction", "1"),
    ("technique=sc parallel=pp4_dp2 training.steps=20", "technique.sc.warmup_steps", "below training.steps = 20"),
    (
        "technique=sc parallel=pp4_dp2 technique.sc.codec.rank=128",
        "technique.sc.codec.rank",
        "technique.sc.codec.rank=8",
    ),
    # probes that could measure nothing
    ("training.probes.trace_step=301", "training.probes.trace_step", "at most training.steps = 300"),
    (
        "training.probes.phases=true training.probes.interval_steps=301",
        "training.probes.interval_steps",
        "fix:     training.probes.interval_steps=300",
    ),
    ("training.probes.memory=true training.steps=1", "training.steps", "fix:     training.steps=2"),
    (
        "training.probes.memory=true training.probes.interval_steps=300",
        "training.probes.interval_steps",
        "fix:     training.probes.interval_steps=299",
    ),
    (
        "training.probes.memory=true training.probes.phases=true training.probes.interval_steps=1",
        "training.probes.interval_steps",
        "fix:     training.probes.interval_steps=2",
    ),
    (
        "technique=baseline training.probes.error_independence=true",
        "training.probes.error_independence",
        "technique=cb",
    ),
    (
        "parallel=pp2 training.probes.error_independence=true",
        "training.probes.error_independence",
        "technique.cb.epilogue_only=false",
    ),
    ("+ablation=baseline technique.fe.enabled=true", "technique.fe.enabled", "false, which ablation=baseline is about"),
    ("technique=baseline +ablation=cb_no_epilogue", "technique", "cb, which ablation=cb_no_epilogue is about"),
    (
        "technique=cb_topk technique.cb.codec.density=0.05",
        "technique.cb.codec.density",
        "fix:     technique.cb.codec.match_rank=null",
    ),
    ("technique=cb_topk technique.cb.codec.match_rank=null", "technique.cb.codec.density", "or set match_rank"),
    (
        "technique=cb_topk technique.cb.codec.match_rank=null technique.cb.codec.density=1.5",
        "technique.cb.codec.density",
        "at most 1",
    ),
    ("technique=cb_topk technique.cb.codec.rank=8", "technique.cb.codec.rank", "codec@technique.cb.codec=low_rank"),
    (
        "+ablation=cb_topk codec@technique.cb.codec=low_rank",
        "codec@technique.cb.codec",
        "top_k, which ablation=cb_topk is about",
    ),
    ("+ablation=cb_cold_start codec@technique.cb.codec=top_k", "codec@technique.cb.codec", "low_rank, which"),
    ("+ablation=cb_carry technique.cb.residual=reset", "technique.cb.residual", "carry, which"),
    ("technique=cb +ablation=baseline", "technique", "baseline, which ablation=baseline is about"),
    ("+ablation=cb_no_epilogue technique.cb.epilogue_only=true", "technique.cb.epilogue_only", "false, which"),
    ("+ablation=cb technique.cb.enabled=false", "technique.cb.enabled", "true, which ablation=cb is about"),
    ("+ablation=cb technique.cb.compress_forward=true", "technique.cb.compress_forward", "false, which"),
]


@pytest.fixture(scope="module", autouse=True)
def _composed_once() -> Iterator[None]:
    with composed_once():
        yield


@pytest.mark.parametrize(("line", "key", "text"), WRONG, ids=[line for line, _, _ in WRONG])
def test_wrong_input(line: str, key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(line)
    error = caught.value
    assert key in [problem.key for problem in error.problems]
    assert failing(line, error.problems) == []
    shown = str(error)
    assert shown.startswith("ConfigError")
    assert text in shown
    assert "allowed:" in shown
    assert "fix:" in shown
    assert len(shown.splitlines()) <= 20, "more than a screen"


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("-m model=gpt_mini,gpt_tyni", "model=gpt_tyni"),
        ("-m model=gpt_mini,gpt_tiny parallel=pp4,pp4_v2", "model=gpt_tiny parallel=pp4_v2"),
        ("-m +ablation=baseline,cb technique=baseline", "+ablation=cb technique=baseline"),
        ("hydra.mode=MULTIRUN training.seed=1,-1", "training.seed=-1"),
    ],
)
def test_a_sweep_says_which_run_is_wrong(line: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(line)
    assert str(caught.value).splitlines()[0].endswith(f" in {where}")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        composed("training.steps=many training.precision=fp8 technique.cb.codec.rank=no")
    assert [problem.key for problem in caught.value.problems] == [
        "technique.cb.codec.rank",
        "training.steps",
        "training.precision",
    ]


def test_many_problems_still_fit_on_a_screen() -> None:
    error = ConfigError([Problem(f"key_{number}", number, "less", "more") for number in range(40)])
    assert len(str(error).splitlines()) <= 24
    assert "34 more" in str(error)


def test_the_error_survives_pickling() -> None:
    error = ConfigError(Problem("a.b", "x" * 1000, "y", "z"), where="run 1")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert max(map(len, str(error).splitlines())) < 200


def test_a_long_composing_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    tell = Composing(clock=lambda: now)
    for done in range(100):
        now = 2.0 * done
        tell(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "checking the configurations: 3 of 100 runs, 194 s left"
    assert len(lines) == 13  # each 15 s, at the next run that is through


def test_a_short_composing_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tell = Composing(clock=lambda: 0.0)
    for done in range(3):
        tell(done, 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("values", ["1,2", "range(1,4)", "range(4,1,-1)", "range(0,1,0.3)", "glob(pp*)", "choice(3)"])
def test_values_are_counted_as_hydra_lists_them(values: str) -> None:
    """The count that limits a sweep is told without making the values."""
    key = "parallel" if values.startswith("glob") else "training.seed"
    arguments, _ = parse(["-m", f"{key}={values}"])
    (override,) = OverridesParser.create(config_loader=_Composer.of(arguments).loader).parse_overrides(
        [f"{key}={values}"]
    )
    assert _size(override) == len(list(override.sweep_string_iterator()))
