"""Imported once by the fork server: what every rank needs."""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.filterwarnings("ignore")

from optimus_cc.training import cpu  # noqa: E402

cpu.enable()

import torch._dynamo  # noqa: E402, F401  # what the first optimizer of a process loads otherwise

import optimus_cc.training.loop  # noqa: E402, F401
