"""One rank of an evaluation: ``python -m optimus_cc.evaluation FOLDER``, started by a launcher.

The folder holds the configuration, with the run and the checkpoint that are meant. Results go into the run's folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from optimus_cc.process import Report, run_rank


def _evaluate(path: Path, report: Report) -> int:
    from optimus_cc.runs import RunFolder
    from optimus_cc.training import backend as backends

    folder = RunFolder(path)
    config = folder.run_config()
    if config.evaluation.data_dir is not None:  # nothing is to be looked up, and nobody to be told of it
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    backends.choose_device(config)

    from optimus_cc.evaluation import measure, results, trained
    from optimus_cc.evaluation.model import for_evaluation, load_model
    from optimus_cc.evaluation.scoring import Scorer
    from optimus_cc.evaluation.service import Service
    from optimus_cc.training.corpus import cache_folder
    from optimus_cc.training.tokenizer import Tokenizer

    evaluated = for_evaluation(config)
    backend = backends.start(evaluated)
    tokenizer = Tokenizer.load(cache_folder(config))
    found = trained.chosen(config)
    told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told
        report.beat()
        if report.rank == 0 and (done == total or time.monotonic() - told > 1):
            told = time.monotonic()
            folder.append_metrics({"kind": "progress", "done": done, "total": total})

    scorer = Scorer(
        load_model(evaluated, backend, tokenizer.padded_vocabulary_size, found, report.beat),
        backend,
        vocabulary_size=tokenizer.vocabulary_size,
        batch_size=config.evaluation.batch_size,
        progress=progress,
    )
    checkpoint = results.describe(found)  # from here on its files may go
    service = Service(scorer)
    if backend.rank != 0:
        service.serve()
    else:
        run = trained.run_folder(config)

        def begin(kind: str) -> None:
            report.beat()
            folder.append_metrics({"kind": "begin", "what": kind})

        files: list[Any] = []
        for result in measure.results_of(config, checkpoint, tokenizer, service.score, str(backend.device.type), begin):
            files.append(str(results.write(run, result)))
        folder.write_summary({"files": files})
        service.end()
    backends.stop()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m optimus_cc.evaluation FOLDER")
    sys.exit(run_rank(lambda report: _evaluate(Path(sys.argv[1]), report)))
