"""The one entry point: composes a configuration, checks it and hands it to its task. See ``python run.py --help``."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.utils import _run_hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from optimus_cc import command, tasks
from optimus_cc.config import ConfigError, compose
from optimus_cc.config.help import help_text
from optimus_cc.config.mistakes import MISTAKES
from optimus_cc.config.sweeps import Composing


def job(composed: DictConfig) -> dict[str, Any]:
    """One run. Hydra calls this, once or for each run of a sweep."""
    from optimus_cc.config import load
    from optimus_cc.runs import RunFailed

    config = load(compose.with_run(composed, list(HydraConfig.get().overrides.task)))
    try:
        return tasks.resolve(config.task.name)(config)
    except BrokenPipeError:
        command.nobody_reads()
        return {}
    except ConfigError as error:
        if HydraConfig.get().mode != RunMode.RUN:
            raise
        print(error, file=sys.stderr)  # without what Hydra says of it
        sys.exit(2)
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        # Somebody asked for an end: the rest of a sweep ends too. A single run has no rest, and Hydra nothing to add.
        if failure.state != "failed" or HydraConfig.get().mode == RunMode.RUN:
            sys.exit(failure.exit_code)
        raise


def main() -> int:
    version.setbase(compose.HYDRA_VERSION)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come here as they are
    try:
        arguments, parser = compose.parse(sys.argv[1:])
        if arguments.help:
            print(help_text([compose.CONF, *map(Path, filter(None, [arguments.config_dir]))]), end="")
            return 0
        information = compose.asks_for_information(arguments)
        if not information:
            compose.compose(arguments, Composing())  # every run of a sweep that is known is right, or none starts
        try:
            _run_hydra(
                args=arguments,
                args_parser=parser,
                task_function=job,
                config_path=str(compose.CONF),
                config_name=compose.PRIMARY,
            )
        except MISTAKES as error:
            hydras_own = isinstance(error, (HydraException, OmegaConfBaseException))
            if isinstance(error, ConfigError) or not (information or hydras_own):
                raise  # a task's
            raise compose.explain(arguments, error) from None
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from optimus_cc.runs import RunFailed

        if isinstance(error, RunFailed):
            return error.exit_code  # it was shown when it happened
        raise
    finally:
        shutil.rmtree(compose.SCRATCH, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main, draws=True))
