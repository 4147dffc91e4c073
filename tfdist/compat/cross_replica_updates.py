# SPDX-License-Identifier: Apache-2.0
"""Lets Keras' optimizers update variables in the scope of a strategy, outside of `strategy.run`.

Keras does so by `tf.__internal__.distribute.interim.maybe_merge_call`, which looks for a replica's context where there
is none and fails with an AttributeError. All replicas are given the same update there, so nothing has to be merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import replacing


def allow() -> None:
    """Makes `optimizer.apply` in cross-replica context update each replica's copy; see `plain_loops` for its checks."""
    replacing.once(tf.__internal__.distribute.interim, "maybe_merge_call", _merging)


def _merging(plain: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_merge_call(fn: Callable[..., Any], strategy: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.distribute.in_cross_replica_context():
            return plain(fn, strategy, *args, **kwargs)
        return fn(strategy, *args, **kwargs)

    return maybe_merge_call
