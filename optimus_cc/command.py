"""How a program on the command line ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def nobody_reads() -> None:
    """What is printed from now on goes nowhere: a closed pipe is no mistake."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main: Callable[[], int]) -> int:
    """What ``main`` returns; 0 if nobody reads its output any more, 130 after Ctrl-C."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        nobody_reads()
        return 0
    except KeyboardInterrupt:
        return 130
    return code
