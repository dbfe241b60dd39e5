"""``python -m optimus_cc.evaluation.compare RUN_FOLDER DATA_DIR``: the newest checkpoint scored in one process, by
lm-eval's own model for ``transformers`` and by this project's, on the CPU: how much they differ, and how fast they are.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from optimus_cc import checkpoints, command
from optimus_cc.config import RunConfig
from optimus_cc.config.evaluation import EvaluationConfig
from optimus_cc.config.parallel import ParallelConfig
from optimus_cc.config.schema import changed
from optimus_cc.evaluation import tasks
from optimus_cc.runs import RunFolder

Answers = list[tuple[float, bool]]
Scored = tuple[Answers, float]
"""And the seconds it took."""


def requests_of(settings: EvaluationConfig) -> list[Any]:
    """The ``loglikelihood`` requests that lm-eval makes of the tasks: its instances, which know their task."""
    from lm_eval.api.model import LM

    made: list[Any] = []

    class Recorder(LM):
        def loglikelihood(self, requests: list[Any]) -> Answers:
            made.extend(requests)
            return [(0.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: list[Any]) -> list[str]:
            raise NotImplementedError

    tasks.evaluate(tasks.load(settings), Recorder(), settings)
    return made


def of_transformers(config: RunConfig, tokenizer: Any, found: checkpoints.Checkpoint) -> Any:
    """lm-eval's own model, of the same checkpoint exported."""
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    from optimus_cc.evaluation.export import huggingface_model, read_weights

    model = huggingface_model(config.model, read_weights(found), tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        end = tokenizer.end_of_document_token
        theirs = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token=end, bos_token=end)
    return HFLM(pretrained=model, tokenizer=theirs, batch_size=config.evaluation.batch_size, device="cpu")


def of_ours(config: RunConfig, tokenizer: Any, found: checkpoints.Checkpoint) -> Any:
    """This project's, with the whole model in this process."""
    from optimus_cc.training import backend as backends

    backends.choose_device(config)
    from optimus_cc.evaluation.harness import MegatronLM
    from optimus_cc.evaluation.model import for_evaluation, load_model
    from optimus_cc.evaluation.scoring import Scorer

    config = for_evaluation(config)
    backend = backends.start(config)
    model = load_model(config, backend, tokenizer.padded_vocabulary_size, found)
    scorer = Scorer(model, backend, vocabulary_size=tokenizer.vocabulary_size, batch_size=config.evaluation.batch_size)
    return MegatronLM(tokenizer, config.model.sequence_length, scorer.score)


def timed(make: Callable[[], Any], requests: list[Any], repetitions: int) -> Scored:
    """The answers of a model, and the shortest time that it took for all of them."""
    model = make()
    model.loglikelihood(requests[:8], disable_tqdm=True)
    times, answers = [], []
    for _ in range(repetitions):
        began = time.perf_counter()
        answers = model.loglikelihood(requests, disable_tqdm=True)
        times.append(time.perf_counter() - began)
    return answers, min(times)


def report(requests: list[Any], theirs: Scored, ours: Scored) -> str:
    """A line for each task, and the ratio of the times."""
    differences: dict[str, list[float]] = {}
    greedy = 0
    for request, (one, likeliest), (other, also) in zip(requests, theirs[0], ours[0], strict=True):
        differences.setdefault(request.task_name, []).append(abs(one - other))
        greedy += likeliest != also
    lines = [
        f"  {task:<18}{len(values):>6} requests   largest difference of a log-likelihood {max(values):.1e}"
        for task, values in differences.items()
    ]
    lines.append(f"  {greedy} of {len(requests)} differ in whether the continuation is the likeliest one")
    lines.append(
        f"  transformers {theirs[1]:.2f} s, this project {ours[1]:.2f} s: {theirs[1] / ours[1]:.2f} times as fast"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m optimus_cc.evaluation.compare", description=__doc__)
    parser.add_argument("run", type=command.to_path, metavar="RUN_FOLDER")
    parser.add_argument("data_dir", metavar="DATA_DIR", help="holds TASK.jsonl for each of the paper's tasks")
    parser.add_argument("--limit", type=int, help="items of each task")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(arguments)
    os.environ["OPTIMUS_CC_DEVICE"] = "cpu"
    import torch

    torch.set_num_threads(options.threads)
    from optimus_cc.evaluation import trained
    from optimus_cc.training.tokenizer import Tokenizer

    folder = RunFolder(options.run)
    settings = EvaluationConfig(data_dir=options.data_dir, limit=options.limit, batch_size=options.batch_size)
    config = changed(folder.run_config(), evaluation=settings, parallel=ParallelConfig())
    found = checkpoints.newest(folder.checkpoints)
    if found is None:
        print(f"error: {folder.path} has no complete checkpoint", file=sys.stderr)
        return 2
    tokenizer = Tokenizer.load(trained.corpus_folder(config))
    requests = requests_of(settings)
    theirs = timed(lambda: of_transformers(config, tokenizer, found), requests, options.repetitions)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["OPTIMUS_CC_RENDEZVOUS"] = f"file://{scratch}/rendezvous"
        ours = timed(lambda: of_ours(config, tokenizer, found), requests, options.repetitions)
    print(f"{folder.run_id}, step {found.step}, batch {options.batch_size}, {options.threads} threads, lm-eval")
    print(report(requests, theirs, ours))
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
