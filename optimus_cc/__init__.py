"""Optimus-CC: communication compression for 3D-parallel training of language models on Megatron-core.

``optimus_cc.attach`` installs it on a model that any Megatron-core loop trains. Importing this package imports
neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimus_cc.communication.attach import Attachment, attach

__all__ = ["Attachment", "attach"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from optimus_cc.communication import attach as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
