# SPDX-License-Identifier: Apache-2.0
"""Base classes of objects whose iteration AutoGraph converts into a loop of the graph.

There is no public way: `for x in iterator` in a `tf.function` becomes a loop in the graph for tensors, for tf.data's
own classes, and for what is derived from these two. Keras hands each `tf.distribute.DistributedIterator`, the public
class above them, into a function of its own as a whole.
"""

from __future__ import annotations

from tensorflow.python.types import distribute

NEEDS = (
    "tensorflow.python.types.distribute:Iterable",
    "tensorflow.python.types.distribute:Iterator",
)

LoopIterator = distribute.Iterator
LoopIterable = distribute.Iterable
