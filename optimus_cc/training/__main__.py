"""One rank of a training run: ``python -m optimus_cc.training RUN_FOLDER``, started by a launcher.

Exit codes: 0 trained to the end; 75 (EX_TEMPFAIL) stopped at a step boundary because it was asked to; 1 failed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from optimus_cc.process import EXIT_PREEMPTED, Report, leave_at_once, run_rank


def main(folder_path: str) -> int:
    return run_rank(lambda report: _train(Path(folder_path), report))


def _train(path: Path, report: Report) -> int:
    from optimus_cc.runs import RunFolder
    from optimus_cc.training import backend as backends

    folder = RunFolder(path)
    config = folder.run_config()
    backends.choose_device(config)

    from megatron.core import parallel_state

    from optimus_cc.training import loop
    from optimus_cc.training.checkpoint import Checkpoints
    from optimus_cc.training.corpus import cache_folder
    from optimus_cc.training.datasets import batches, build_datasets
    from optimus_cc.training.tokenizer import Tokenizer
    from optimus_cc.training.tracking import Tracker

    stop = loop.StopRequest.by_signals()
    backend = backends.start(config)
    corpus = cache_folder(config)
    training = config.training
    train_set, validation_set = build_datasets(
        config,
        corpus,
        train_samples=training.steps * training.global_batch_size,
        validation_samples=training.validation_batches * training.global_batch_size,
    )
    trainer = loop.Trainer.build(config, backend, Tokenizer.load(corpus).padded_vocabulary_size)
    tracker = Tracker.start(config, folder) if backend.rank == 0 else None

    def record(values: dict[str, object]) -> None:
        if tracker is not None:
            folder.append_metrics(values)
            tracker.log(values)

    def source(dataset: Any) -> loop.BatchSource:
        return lambda start_step: batches(
            dataset,
            start_step=start_step,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=config.parallel.data_parallel_size,
            num_workers=training.data_workers,
            pin_memory=backend.is_cuda,
        )

    saver = Checkpoints(config, folder.checkpoints, backend, report.beat)
    resumed, notes = saver.resume(trainer)
    if tracker is not None:
        to_repeat = ("validation",) if resumed is not None and resumed["validation_due"] else ()
        said = {"kind": "resume", "step": trainer.step, "notes": notes} if notes else None
        folder.cut_metrics(trainer.step, to_repeat, said)
        print(*notes, sep="\n", flush=True)
    result = loop.run(
        trainer,
        source(train_set),
        source(validation_set),
        record,
        heartbeat=report.beat,
        stop=stop,
        saver=saver,
        resumed=resumed,
        trace_path=folder.trace_path,
    )
    if isinstance(result, loop.Stopped):
        print(f"stopped at step {result.step}: asked to; a checkpoint is there", flush=True)
        leave_at_once(EXIT_PREEMPTED)
    if tracker is not None:
        folder.write_summary({"run_id": folder.run_id, **result})
        tracker.finish(result)
    backends.stop()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m optimus_cc.training RUN_FOLDER")
    sys.exit(main(sys.argv[1]))
