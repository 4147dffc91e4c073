# SPDX-License-Identifier: Apache-2.0
"""Calls that overlap with a `fit` under policies on parameter servers: refused, or every example counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aggregated_cluster import BATCH, STEPS, X, Y, compiled
from overlapping import during_fit

import tfdist

Policies = Callable[..., tfdist.ParameterServerStrategy]


def _fit(model: Any) -> Callable[..., Any]:
    return lambda **kwargs: model.fit(X, Y, batch_size=BATCH, verbose=0, **kwargs)


def _predict(model: Any) -> Callable[[], Any]:
    return lambda: model.predict(X, batch_size=BATCH, verbose=0)


def _evaluate(model: Any) -> Callable[[], Any]:
    return lambda: model.evaluate(X, Y, batch_size=BATCH, verbose=0)


def test_other_calls_are_refused_during_a_fit(with_policies: Policies) -> None:
    strategy = with_policies(tfdist.SoftSync(1))
    model, other = compiled(strategy), compiled(strategy)
    for call in (_fit(model), _fit(other), _evaluate(model), _predict(model)):
        error = during_fit(_fit(model), call).error
        assert "overlaps with another thread's call" in error
        assert "\n" not in error
    for chosen in (model, other):
        error = during_fit(_fit(model), _fit(chosen), in_thread=False).error
        assert error.startswith(f"fit of model {chosen.name!r} is called within a callback of fit of model")
        assert "\n" not in error
    assert (int(model.optimizer.iterations), int(other.optimizer.iterations)) == (6 * STEPS, 0)
