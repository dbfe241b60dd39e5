"""What ``python run.py --help`` prints. Hydra's own help composes first, which takes longer than a look is worth."""

from __future__ import annotations

import textwrap
from pathlib import Path

GROUPS = {
    "task": "what to do",
    "model": "the GPT's shape, and the compression rank that suits it",
    "parallel": "ranks and schedule: tp tensor, pp pipeline, dp data parallel, v chunks per pipeline rank",
    "technique": "what is done to the traffic",
    "codec": "how a tensor is compressed, wherever that is done: codec@technique.cb.codec=OPTION",
    "ablation": "one difference laid on top, technique included: +ablation=OPTION, with a plus",
    "experiment": "a table or figure of the paper: the sweep that it is made of",
    "data": "the corpus",
    "tokenizer": "text to tokens",
    "optimizer": "optimizer and learning-rate schedule",
    "training": "length, batches, precision, validation",
    "cluster": "the machines and their links",
    "benchmark": "what task=benchmark measures",
    "evaluation": "what task=evaluate run=RUN, or a training at its end, measures of a model",
    "simulation": "what task=simulate predicts with, task=calibrate fits to",
    "export": "in which format task=export run=RUN writes a checkpoint",
    "launcher": "how ranks are started, and how many runs of a sweep at a time",
    "tracking": "a copy of the metrics elsewhere",
}

_TEMPLATE = """\
Trains a GPT under 3D parallelism and compresses the traffic on its critical path (Optimus-CC).

  python run.py [GROUP=OPTION ...] [KEY=VALUE ...] [+ablation=OPTION]

Examples
  python run.py                             compressed backpropagation in four pipeline stages
  python run.py +ablation=cb_no_epilogue    one ablation
  python run.py +ablation=sc_fraction_50 parallel=pp4_dp2
                                            gradients (sc_*, cb_fe_sc) need several data-parallel ranks
  python run.py parallel=tp2_pp2_dp2 technique.cb.codec.rank=8
  python run.py -m +ablation=baseline,cb training.seed=1,2,3
                                            a sweep: every combination, one after the other
  python run.py -m +ablation=baseline,cb launcher.dry_run=true
                                            what it would start and take; starts nothing
  python run.py experiment=laptop/table_pretraining
                                            a table of the paper, small
  python run.py +ablation=baseline,cb launcher=slurm
                                            the sweep as jobs of SLURM: docs/slurm.md
  python run.py data=jsonl data.path=corpus.jsonl.zst data.label=corpus
  python run.py --cfg job model=gpt_mini    show the configuration, with all its keys; start nothing

Groups and their options
{groups}

Each run leaves one folder, runs_dir/ID (runs_dir=runs). A finished run is not run twice unless force=true.
--config-dir FOLDER adds options of your own, in a folder for each group. --hydra-help lists Hydra's other flags.
"""


def help_text(folders: list[Path]) -> str:
    """The help, with the options that the configuration folders hold."""
    lines = []
    for group, meaning in GROUPS.items():
        files = [(file, folder / group) for folder in folders for file in (folder / group).rglob("*.yaml")]
        options = sorted({str(file.relative_to(folder).with_suffix("")) for file, folder in files})
        lines.append(f"  {group:<11}{meaning}")
        lines += textwrap.wrap(", ".join(options), 100, initial_indent=" " * 15, subsequent_indent=" " * 15)
    return _TEMPLATE.format(groups="\n".join(lines))
