"""One rank asks, all ranks compute: lm-eval runs on rank 0, the model on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from optimus_cc.evaluation.scoring import Score, Scorer
from optimus_cc.evaluation.windows import Part

_WAIT = timedelta(days=30)
"""How long ranks wait to be asked: rank 0 may read data for long. If it dies or hangs, the supervisor ends them."""


class Service:
    """A scorer that rank 0 uses as its own. Made on all ranks; then rank 0 calls :meth:`score`, the others wait in
    :meth:`serve` until rank 0 calls :meth:`end`."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._group = dist.new_group(backend="gloo", timeout=_WAIT)

    def score(self, requests: Sequence[Sequence[Part]]) -> list[Score]:
        """See :meth:`optimus_cc.evaluation.scoring.Scorer.score`."""
        self._tell(requests)
        return self._scorer.score(requests)

    def serve(self) -> None:
        while (requests := self._tell(None)) is not None:
            self._scorer.score(requests)

    def end(self) -> None:
        self._tell(None)

    def _tell(self, requests: Sequence[Sequence[Part]] | None) -> Sequence[Sequence[Part]] | None:
        """What rank 0 says, on every rank."""
        said = [requests]
        dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]
