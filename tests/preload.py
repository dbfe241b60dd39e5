"""Imported once by the fork server: what every rank needs."""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.filterwarnings("ignore")

import optimus_cc.training.preload  # noqa: E402, F401
