"""One rank of a benchmark: ``python -m optimus_cc.benchmark FOLDER``, started by a launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from optimus_cc.process import Report, run_rank


def _measure(path: Path, report: Report) -> int:
    from optimus_cc.config.benchmark import CodecsConfig, CostConfig
    from optimus_cc.runs import RunFolder
    from optimus_cc.training import backend as backends

    folder = RunFolder(path)
    config = folder.run_config()
    device = backends.choose_device(config)

    def record(values: dict[str, Any]) -> None:
        report.beat()
        if report.rank == 0:
            folder.append_metrics(values)

    if isinstance(config.benchmark, CodecsConfig):
        from optimus_cc.benchmark import codecs

        result = codecs.measure(config, config.benchmark, device, record)
    else:
        backend = backends.start(config)
        if isinstance(config.benchmark, CostConfig):
            from optimus_cc.benchmark import cost

            result = cost.measure(config, backend, record)
        else:
            from optimus_cc.benchmark import links

            result = links.measure(config, backend, record)
        backends.stop()
    if report.rank == 0:
        folder.write_summary(result)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m optimus_cc.benchmark FOLDER")
    sys.exit(run_rank(lambda report: _measure(Path(sys.argv[1]), report)))
