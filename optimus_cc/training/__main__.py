"""One rank of a training run: ``python -m optimus_cc.training RUN_FOLDER``, started by a launcher.

Exit codes: 0 trained to the end; 75 (EX_TEMPFAIL) stopped at a step boundary because it was asked to; 1 failed.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

from optimus_cc.process import EXIT_PREEMPTED, Report, die_with_parent, install_stack_dump


def main(folder_path: str) -> int:
    die_with_parent()
    install_stack_dump()
    report = Report.from_environment()
    try:
        return _train(Path(folder_path), report)
    except BaseException as error:
        report.failed(error)
        traceback.print_exc()
        _leave_at_once()


def _train(path: Path, report: Report) -> int:
    # Megatron-core warns at import about every optional package that is not there.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from optimus_cc.config import load
    from optimus_cc.runs import RunFolder
    from optimus_cc.training import backend as backends

    folder = RunFolder(path)
    mapping = folder.config()
    if mapping is None:
        raise RuntimeError(f"{folder.config_path} can't be read")
    config = load(mapping)
    backends.choose_device(config)

    from megatron.core import parallel_state

    from optimus_cc.training import loop
    from optimus_cc.training.corpus import cache_folder
    from optimus_cc.training.datasets import batches, build_datasets
    from optimus_cc.training.tokenizer import Tokenizer
    from optimus_cc.training.tracking import Tracker

    stop = loop.StopRequest()
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

    result = loop.run(
        trainer,
        source(train_set),
        source(validation_set),
        record,
        heartbeat=report.beat,
        stop=stop,
        trace_path=folder.trace_path,
    )
    if isinstance(result, loop.Stopped):
        print(f"stopped at step {result.step}: asked to", flush=True)
        _leave_at_once(EXIT_PREEMPTED)
    if tracker is not None:
        folder.write_summary({"run_id": config.run_id, **result})
        tracker.finish(result)
    backends.stop()
    return 0


def _leave_at_once(code: int = 1) -> NoReturn:
    """End without waiting for communicators whose peers may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m optimus_cc.training RUN_FOLDER")
    sys.exit(main(sys.argv[1]))
