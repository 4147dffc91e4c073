# SPDX-License-Identifier: Apache-2.0
"""`Compression("auto")`: which codec is chosen, and that all workers choose the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import simulated

import tfdist
from tfdist.compression import choice
from tfdist.compression.codec import LocalTransport

SHAPES = ((64, 32), (32,), (3, 3, 8, 16), ())


def _choose(
    monkeypatch: pytest.MonkeyPatch, secs: Sequence[float], error_bound: float, step_secs: float | None = None
) -> choice.Choice:
    """Chooses where the exchanges take so long: as they are, and with each codec whose error is within the bound."""
    left = list(secs)
    monkeypatch.setattr(choice, "_secs", lambda exchange, slowest: left.pop(0))
    found = choice.choose(choice.made_up(SHAPES), list, LocalTransport(), float, error_bound, step_secs)
    assert not left
    return found


def test_the_fastest_codec_is_chosen_and_the_line_says_why(monkeypatch: pytest.MonkeyPatch):
    found = _choose(monkeypatch, [2.0, 1.0, 0.5, 0.7, 0.0123], 0.9999)
    assert repr(found.codec) == "Threshold()"
    assert found.reason == "Threshold(): a sum of 3,233 values takes 2.00 s as they are; a sum with it 12.3 ms"


def test_none_is_chosen_where_no_codec_gains_enough(monkeypatch: pytest.MonkeyPatch):
    found = _choose(monkeypatch, [1.0, 0.9, 0.81, 2.0, 3.0], 0.9999)
    assert found.codec is None
    assert found.reason.startswith(
        "none: a sum of 3,233 values takes 1.00 s as they are; a sum with the fastest codec, PowerSGD(rank=4), 810.0 ms"
    )


def test_none_is_chosen_where_the_step_gains_too_little(monkeypatch: pytest.MonkeyPatch):
    secs = [0.1, 0.04, 0.2, 0.2, 0.2]
    assert "and a step 1.00 s;" in _choose(monkeypatch, list(secs), 0.9999, step_secs=1.0).reason
    assert _choose(monkeypatch, list(secs), 0.9999, step_secs=1.0).codec is not None
    assert _choose(monkeypatch, list(secs), 0.9999, step_secs=2.0).codec is None


def test_none_is_chosen_where_nothing_is_to_be_saved(monkeypatch: pytest.MonkeyPatch):
    assert _choose(monkeypatch, [0.005, 0.001, 0.002, 0.003, 0.004], 0.9999).codec is None


def test_codecs_that_leave_too_much_are_not_measured(monkeypatch: pytest.MonkeyPatch):
    found = _choose(monkeypatch, [2.0, 1.0], 0.01)
    assert repr(found.codec) == "HalfPrecision(dtype='bfloat16')"
    assert "; beyond error_bound=0.01: PowerSGD(rank=4) leaves " in found.reason
    assert _choose(monkeypatch, [2.0], 1e-9).codec is None


def test_a_model_without_gradients_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "_secs", lambda exchange, slowest: 1.0)
    assert choice.choose([], list, LocalTransport(), float, 0.5).codec is None


def test_workers_of_different_speed_choose_alike():
    meeting = simulated.Meeting(2)

    def on(worker: int) -> Any:
        return choice.choose(
            choice.made_up(SHAPES), list, LocalTransport(), lambda value: max(meeting.gather(worker, value)), 0.9
        )

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
