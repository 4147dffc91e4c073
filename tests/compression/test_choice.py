# SPDX-License-Identifier: Apache-2.0
"""`Compression("auto")`: which codec is chosen, and that all workers choose the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
import simulated

import tfdist
from tfdist.compression import choice

SHAPES = ((1024, 512), (512,), (3, 3, 64, 64), ())


def _choose(
    monkeypatch: pytest.MonkeyPatch, latency: float, plain: float, error_bound: float = 0.9999, shapes: Any = SHAPES
) -> tuple[Any, str]:
    """Chooses where sums of 4 numbers and of the gradients take so long between two workers, and codecs no time."""
    secs, alone = iter([latency, plain]), choice._alone
    monkeypatch.setattr(choice, "_secs", lambda call, slowest: next(secs))
    monkeypatch.setattr(choice, "_alone", lambda *given: (0.0, alone(*given)[1]))
    return choice.choose(choice.made_up(shapes), list, ("worker:0", "worker:1"), float, error_bound)


def test_a_slow_network_gets_a_codec_of_few_bytes(monkeypatch: pytest.MonkeyPatch):
    codec, reason = _choose(monkeypatch, 1e-4, 0.15)
    assert repr(codec) in ("PowerSGD(rank=4)", "SignSGD()", "Threshold()")
    said = r"(.*): a sum of 561,665 values takes 150\.0 ms as they are; with it about (.*) ms"
    shown = re.fullmatch(said, reason)
    assert shown
    assert shown[1] == repr(codec)
    assert float(shown[2]) < 75


def test_half_precision_takes_half_the_time_of_a_slow_network(monkeypatch: pytest.MonkeyPatch):
    codec, reason = _choose(monkeypatch, 1e-4, 0.15, error_bound=0.01)
    assert repr(codec) == "HalfPrecision(dtype='bfloat16')"
    said = r"with it about (\d+\.\d) ms; beyond error_bound=0\.01: PowerSGD\(rank=4\) leaves "
    shown = re.search(said, reason)
    assert shown
    assert 75 <= float(shown[1]) < 120


def test_no_codec_is_chosen_for_few_values_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch):
    assert _choose(monkeypatch, 4e-3, 30e-3, shapes=((10, 32), (32, 1)))[0] is None


@pytest.mark.parametrize(
    ("latency", "plain"),
    [
        pytest.param(1e-6, 4e-3, id="nothing is to be saved"),
        pytest.param(1.0, 1.3, id="an exchange is mostly latency", marks=pytest.mark.slow),
    ],
)
def test_no_codec_is_chosen_where_none_gains_enough(monkeypatch: pytest.MonkeyPatch, latency: float, plain: float):
    codec, reason = _choose(monkeypatch, latency, plain)
    assert codec is None
    assert re.match(r"none: a sum of 561,665 values takes .* as they are; with the fastest codec, .*, about", reason)


def test_no_codec_is_chosen_for_a_model_without_gradients():
    assert choice.choose([], list, ("worker:0",), float, 0.5)[0] is None


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
