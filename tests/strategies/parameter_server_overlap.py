# SPDX-License-Identifier: Apache-2.0
"""Calls that overlap with a `fit` of asynchronous parameter servers: threads are refused, callbacks are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlapping import during_fit
from parameter_server_cluster import BATCH, STEPS, Batches, X, Y, dense

import tfdist


def _fit(model: Any) -> Callable[..., Any]:
    return lambda **kwargs: model.fit(X, Y, batch_size=BATCH, verbose=0, **kwargs)


def _predict(model: Any) -> Callable[[], Any]:
    return lambda: model.predict(X, batch_size=BATCH, verbose=0)


def test_other_threads_are_refused_during_a_fit(strategy: tfdist.ParameterServerStrategy) -> None:
    model, other = dense(strategy), dense(strategy)
    for call in (_fit(model), _fit(other), _predict(model), lambda: model.train_on_batch(X[:8], Y[:8])):
        error = during_fit(_fit(model), call).error
        assert "overlaps with another thread's call" in error
        assert "\n" not in error
    assert (int(model.optimizer.iterations), int(other.optimizer.iterations)) == (4 * STEPS, 0)


def test_calls_within_callbacks_count_right(strategy: tfdist.ParameterServerStrategy) -> None:
    model, other = dense(strategy, metrics=lambda: [Batches()]), dense(strategy)
    for call in (_predict(model), _predict(other), _fit(other)):
        meanwhile = during_fit(_fit(model), call, in_thread=False)
        assert not meanwhile.error
        assert meanwhile.result is not None
        assert float(model.get_metrics_result()["batches"]) == STEPS
    assert (int(model.optimizer.iterations), int(other.optimizer.iterations)) == (3 * STEPS, STEPS)
