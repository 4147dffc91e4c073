# SPDX-License-Identifier: Apache-2.0
"""`Compression("auto")`: which codec is chosen, and that all workers choose the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
import simulated

import tfdist
from tfdist.compression import choice

SHAPES = ((64, 32), (32,), (3, 3, 8, 16), ())


def _choose(
    monkeypatch: pytest.MonkeyPatch, latency: float, plain: float, error_bound: float = 0.9999
) -> choice.Choice:
    """Chooses where sums of 4 numbers and of the gradients take so long between two workers."""
    secs = iter([latency, plain])
    monkeypatch.setattr(choice, "_secs", lambda call, slowest: next(secs))
    return choice.choose(choice.made_up(SHAPES), list, ("worker:0", "worker:1"), float, error_bound)


def test_a_slow_network_gets_the_codec_of_fewest_bytes(monkeypatch: pytest.MonkeyPatch):
    found = _choose(monkeypatch, 1e-3, 60.0)
    assert repr(found.codec) in ("SignSGD()", "Threshold()")
    shown = re.fullmatch(r"(.*): a sum of 3,233 values takes 60\.00 s as they are; with it about (.*) s", found.reason)
    assert shown
    assert shown[1] == repr(found.codec)
    # A sign for each value, at most, and a frame.
    assert float(shown[2]) < 60 / 10


def test_half_precision_takes_half_the_time_of_a_slow_network(monkeypatch: pytest.MonkeyPatch):
    found = _choose(monkeypatch, 1e-3, 60.0, error_bound=0.01)
    assert repr(found.codec) == "HalfPrecision(dtype='bfloat16')"
    assert re.search(r"with it about 30\.\d\d s; beyond error_bound=0\.01: PowerSGD\(rank=4\) leaves ", found.reason)


@pytest.mark.parametrize(
    ("latency", "plain"),
    [
        pytest.param(1e-6, 4e-3, id="nothing is to be saved"),
        pytest.param(1.0, 1.3, id="an exchange is mostly latency"),
        pytest.param(1.0, 0.9, id="sums of all sizes take as long"),
    ],
)
def test_no_codec_is_chosen_where_none_gains_enough(monkeypatch: pytest.MonkeyPatch, latency: float, plain: float):
    found = _choose(monkeypatch, latency, plain)
    assert found.codec is None
    assert re.match(
        r"none: a sum of 3,233 values takes .* as they are; with the fastest codec, .*, about", found.reason
    )


def test_no_codec_is_chosen_for_a_model_without_gradients():
    assert choice.choose([], list, ("worker:0",), float, 0.5).codec is None


def test_workers_of_different_speed_choose_alike():
    meeting = simulated.Meeting(2)

    def on(worker: int) -> Any:
        slowest = lambda value: max(meeting.gather(worker, value))  # noqa: E731
        return choice.choose(choice.made_up(SHAPES), list, ("worker:0", "worker:1"), slowest, 0.9)

    first, second = simulated.on_workers(meeting, 2, on)
    assert first == second


@pytest.mark.parametrize("codec", ["fastest", tfdist.compression.Threshold, None, object()])
def test_what_is_no_codec_is_refused(codec: Any):
    with pytest.raises(ValueError, match=r'Compression\(codec\): give a codec .* or "auto"\. Received: codec='):
        tfdist.Compression(codec)


@pytest.mark.parametrize("variables", ["float32", 16, ""])
def test_variables_travel_in_half_precision_only(variables: Any):
    with pytest.raises(ValueError, match=r"Compression\(variables=\.\.\.\) must be .* Received: variables="):
        tfdist.Compression(tfdist.compression.SignSGD(), variables=variables)


@pytest.mark.parametrize("error_bound", [0, 1, -0.1, "0.5", True, float("nan")])
def test_an_error_bound_is_a_share(error_bound: Any):
    with pytest.raises(
        ValueError, match=r"Compression\(error_bound=\.\.\.\) must be a share .* Received: error_bound="
    ):
        tfdist.Compression("auto", error_bound=error_bound)
