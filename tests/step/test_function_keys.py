# SPDX-License-Identifier: Apache-2.0
"""Functions that a loop makes anew are the same where nothing that they read can have changed."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from tfdist.step.step import Step, Traces, key_of

SETTINGS = types.SimpleNamespace(scale=2.0)
LIST = [1.0]


def step(*batch: Any, scale: float = 1.0) -> Any:
    return batch, scale


def other(*batch: Any) -> Any:
    return batch


def _twice(make: Callable[[Any], Callable[..., Any]], first: Any, second: Any) -> bool:
    return key_of(make(first)) == key_of(make(second))


def test_functions_that_call_the_same_are_the_same():
    assert _twice(lambda called: lambda batch: called(*batch), step, step)
    assert _twice(lambda scale: lambda batch: step(batch, scale=scale), 2.0, 2.0)
    assert _twice(lambda _: lambda batch: step(batch), None, None)


@pytest.mark.parametrize(("first", "second"), [(step, other), (1, 1.0), (0, False), (0.0, -0.0), (1.0, 2.0)])
def test_functions_that_read_different_things_differ(first: Any, second: Any):
    assert not _twice(lambda value: lambda batch: step(batch, value), first, second)
    assert not _twice(lambda value: lambda batch, scale=value: step(batch, scale), first, second)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: lambda batch: step(batch, SETTINGS.scale),
        lambda _: lambda batch: step(batch, LIST[0]),
        lambda _: lambda batch: step(batch, LIST),
        lambda _: lambda batch: step(batch, list(LIST)),
        lambda _: lambda batch: step(batch, undefined),  # noqa: F821
    ],
)
def test_functions_that_read_what_may_change_differ(make: Callable[[Any], Callable[..., Any]]):
    assert not _twice(make, None, None)


def test_a_name_that_is_rebound_makes_another_function():
    names: dict[str, Any] = {"called": step}
    function = eval("lambda batch: called(batch)", names)
    before = key_of(function)
    assert before == key_of(function)
    names["called"] = other
    assert before != key_of(function)


def test_functions_of_one_code_are_dropped_and_named_once(capfd: pytest.CaptureFixture[str]):
    traces, functions = Traces(), []
    for number in range(30):
        functions.append((lambda _: lambda batch: step(batch, SETTINGS.scale))(number))
        assert traces.find(Step(functions[-1]), ("float32",), lambda number=number: number) == number
    newest = [traces.find(Step(each), ("float32",), lambda: pytest.fail("traced again")) for each in functions[22:]]
    assert newest == list(range(22, 30))
    assert traces.find(Step(functions[0]), ("float32",), lambda: "anew") == "anew"
    assert capfd.readouterr().err.count("define it once, outside of the loop") == 1
