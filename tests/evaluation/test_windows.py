"""What the model sees of texts that may not fit into its window, against lm-eval's own windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from optimus_cc.evaluation import windows

PREFIX = -1
TOKENS = st.lists(st.integers(0, 99), max_size=40)


@given(TOKENS, st.integers(1, 12))
def test_rolling_windows_are_those_of_lm_eval(tokens: list[int], window: int) -> None:
    found = list(windows.rolling(tokens, PREFIX, window))
    theirs = get_rolling_token_windows(tokens, PREFIX, window, context_len=1)
    expected = [(context + target[:-1], target) for context, target in map(make_disjoint_window, theirs)]
    assert [(list(part.inputs), list(part.targets)) for part in found] == expected


@given(TOKENS, st.integers(1, 12))
def test_rolling_predicts_each_token_once_after_those_before_it(tokens: list[int], window: int) -> None:
    position = 0
    for part in windows.rolling(tokens, PREFIX, window):
        position += len(part.targets)
        assert len(part.targets) <= len(part.inputs) <= window
        assert list(part.targets) == tokens[position - len(part.targets) : position]
        assert list(part.inputs) == [PREFIX, *tokens][position - len(part.inputs) : position]
    assert position == len(tokens)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.lists(st.integers(0, 99), min_size=1, max_size=30))
def test_a_context_loses_its_beginning_and_a_continuation_nothing(context: list[int], target: list[int]) -> None:
    window = 12
    parts = windows.continuation(context, target, window)
    assert [token for part in parts for token in part.targets] == target
    assert all(len(part.targets) <= len(part.inputs) <= window for part in parts)
    everything = [*context, *target]
    if len(target) <= window:
        (part,) = parts
        assert list(part.inputs) == everything[-(window + 1) : -1]
    else:
        assert parts[0].inputs[0] == context[-1]


@pytest.mark.parametrize(("context", "target"), [([], [1]), ([1], [])])
def test_nothing_to_go_by_or_to_predict_is_a_mistake(context: list[int], target: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        windows.continuation(context, target, 4)
