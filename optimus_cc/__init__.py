"""Optimus-CC: communication compression for 3D-parallel training of language models on Megatron-core.

``optimus_cc.attach`` installs it on a model that any Megatron-core loop trains, ``optimus_cc.attach_to_megatron_lm`` in
Megatron-LM's own loop. Importing this package imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimus_cc.communication.attach import Attachment, attach
    from optimus_cc.communication.megatron_lm import MegatronLMAttachment, attach_to_megatron_lm

__all__ = ["Attachment", "MegatronLMAttachment", "attach", "attach_to_megatron_lm"]

_MODULES = {
    "Attachment": "attach",
    "attach": "attach",
    "MegatronLMAttachment": "megatron_lm",
    "attach_to_megatron_lm": "megatron_lm",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"optimus_cc.communication.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
