"""What ranks on the CPU import, for a process that forks them: imported once, it makes no rank import it again.

Importing it starts no thread, and computes nothing.
"""

from optimus_cc.training import cpu

cpu.enable()

import torch._dynamo  # noqa: E402, F401  # what the first optimizer of a process loads otherwise

import optimus_cc.training.checkpoint  # noqa: E402
import optimus_cc.training.corpus  # noqa: E402
import optimus_cc.training.datasets  # noqa: E402
import optimus_cc.training.loop  # noqa: E402
import optimus_cc.training.tokenizer  # noqa: E402
import optimus_cc.training.tracking  # noqa: E402, F401
