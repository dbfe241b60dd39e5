"""lm-eval's view of a model: text in, log-likelihoods out. The one module, with tasks.py, that imports lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from optimus_cc.evaluation import windows
from optimus_cc.evaluation.scoring import Score
from optimus_cc.evaluation.windows import Part
from optimus_cc.training.tokenizer import Tokenizer

ScoreRequests = Callable[[Sequence[Sequence[Part]]], list[Score]]


class MegatronLM(TemplateLM):
    """A model that a scorer reaches, as lm-eval asks for one.

    lm-eval runs on one rank, which hands all requests over: sharing them out is the scorer's work.

    Args:
        tokenizer: the one that the model was trained with.
        window: the most tokens that the model takes.
        score: scores requests; :meth:`optimus_cc.evaluation.scoring.Scorer.score` for example.
    """

    def __init__(self, tokenizer: Tokenizer, window: int, score: ScoreRequests) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._score = score
        self.max_length = window

    @property
    def eot_token_id(self) -> int:
        """Ends a document, and stands before a text that has no context."""
        return self._tokenizer.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string)

    def tok_decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
        return self._tokenizer.decode(tokens)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As lm-eval does for its own models, which can't score a continuation whose tokens are all shared with its
        context: each of the two is then encoded by itself, as lm-eval does for encoder-decoder models."""
        before, after = super()._encode_pair(context, continuation)
        blanks = context[len(context.rstrip()) :]
        return before, after or self.tok_encode(blanks + continuation)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        parts = [
            windows.continuation(before or [self.prefix_token_id], after, self.max_length) if after else []
            for _, before, after in requests  # what a vocabulary makes no token of, such as a blank, is certain
        ]
        return [(score.log_probability, score.greedy) for score in self._score(parts)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        parts = [
            list(windows.rolling(self.tok_encode(text), self.prefix_token_id, self.max_length))
            for (text,) in (request.args for request in requests)
        ]
        return [score.log_probability for score in self._score(parts)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Not there: the tasks that this project runs compare likelihoods."""
        raise NotImplementedError(
            "this model scores text and generates none; leave tasks with output_type: generate_until out"
        )
