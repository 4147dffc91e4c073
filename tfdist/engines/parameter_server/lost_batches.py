# SPDX-License-Identifier: Apache-2.0
"""The warning about batches that no step was made of, because a worker was lost."""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf


def describe(number: int, total: int, used: int, lost: Collection[int], is_dealt_out: bool) -> str | None:
    """Returns the text of the warning; None if no batch is missing.

    Args:
      number: of the pass.
      total: batches of the pass, or one of tf.data's constants for an unknown or endless number.
      used: how many of them were used.
      lost: the workers whose batches are missing.
      is_dealt_out: True if a batch goes to the worker that asks first.
    """
    is_counted = total != tf.data.UNKNOWN_CARDINALITY
    if not lost or total == tf.data.INFINITE_CARDINALITY or (is_counted and used >= total):
        return None
    what = f"{total - used} of its {total} batches" if is_counted else "an unknown number of batches"
    why = (
        "it had fetched them"
        if is_dealt_out
        else "they were the rest of its share, and the others had come to the end of theirs before it was back; "
        "with data_sharding='dynamic', or policies=[tfdist.SoftSync(1)], the others make them"
    )
    names = " and ".join(f"worker:{worker}" for worker in sorted(lost))
    return f"Pass {number} over the data ended without {what}. {names} was lost; {why}."
