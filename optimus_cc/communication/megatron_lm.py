"""Installs a plan in Megatron-LM's own training loop, ``megatron.training``.

That loop builds the model itself, and asks for Megatron-core's forward-backward function by the name that its module
imported, for training and for evaluation. This name is the one thing that is replaced here. The function that the
loop then gets attaches the plan when it is first called: by then the chunks are wrapped, a checkpoint is loaded, and
the loop has set what it sets in the model's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimus_cc.communication.attach import Attachment, attach
from optimus_cc.communication.gradient_sync import replace
from optimus_cc.config.technique import TechniqueConfig


class MegatronLMAttachment:
    """What :func:`attach_to_megatron_lm` returns: a plan that waits for the loop's model, on this rank."""

    def __init__(
        self, technique: TechniqueConfig, seed: int, split_over_tensor_parallel: bool, on_attach: OnAttach | None
    ) -> None:
        from megatron.training import training

        self._technique = technique
        self._seed = seed
        self._split_over_tensor_parallel = split_over_tensor_parallel
        self._on_attach = on_attach
        self._plan: Attachment | None = None
        self._restore = replace(training, "get_forward_backward_func", self._get_forward_backward_func)

    @property
    def plan(self) -> Attachment:
        """The plan at work.

        Raises:
            RuntimeError: the loop has not run its first forward-backward pass.
        """
        if self._plan is None:
            raise RuntimeError(
                "Megatron-LM's loop has not started yet: it has no model that a plan could be attached to"
            )
        return self._plan

    def detach(self) -> None:
        """Give the loop and the model back to Megatron-LM as they were."""
        self._restore()
        if self._plan is not None:
            self._plan.detach()

    def _get_forward_backward_func(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        # Which schedule it is follows from the layout, and what is asked for here is asked for again in the call.
        return self._forward_backward_func

    def _forward_backward_func(self, *, model: torch.nn.Module | Sequence[torch.nn.Module], **kwargs: Any) -> Any:
        if self._plan is None:
            self._plan = attach(
                self._technique,
                [model] if isinstance(model, torch.nn.Module) else model,
                seed=self._seed,
                split_over_tensor_parallel=self._split_over_tensor_parallel,
            )
            if self._on_attach is not None:
                self._on_attach(self._plan)
        return self._plan.forward_backward_func(model=model, **kwargs)


OnAttach = Callable[[Attachment], None]


def attach_to_megatron_lm(
    technique: TechniqueConfig,
    *,
    seed: int = 0,
    split_over_tensor_parallel: bool = False,
    on_attach: OnAttach | None = None,
) -> MegatronLMAttachment:
    """Let Megatron-LM's training loop run with ``technique``. Every rank calls it, before ``pretrain``.

    Args:
        technique: what is compressed and how.
        seed: as for :func:`~optimus_cc.attach`.
        split_over_tensor_parallel: as for :func:`~optimus_cc.attach`.
        on_attach: called once, with the plan, before the first forward-backward pass: the place to load its state
            when a training goes on.

    Raises:
        ImportError: ``megatron.training`` is not there: it is part of Megatron-LM's repository, and of the
            megatron-core package from 0.19 on.

    The loop's first forward-backward pass raises what :func:`~optimus_cc.attach` raises.
    """
    return MegatronLMAttachment(technique, seed, split_over_tensor_parallel, on_attach)
