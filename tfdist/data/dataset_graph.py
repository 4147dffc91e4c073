# SPDX-License-Identifier: Apache-2.0
"""A data set as text that can be sent to the workers, and what has to be known about it before it goes."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# Operations that call back into the Python of the process that made them, or use a variable of it.
_LOCAL_OPERATIONS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless", "VarHandleOp"})
# Data sets whose inputs 'seed' and 'seed2' stand at these positions.
_SEED_INPUTS = {
    "ShuffleDataset": (2, 3),
    "ShuffleDatasetV3": (2, 3),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleAndRepeatDatasetV2": (2, 3),
    "RandomDataset": (0, 1),
    "RandomDatasetV2": (0, 1),
    "SamplingDataset": (2, 3),
}
# How the names of data sets begin: those that make batches of single elements, those without which the first element
# is there sooner, and those that pass elements on as they are.
_BATCHING = ("BatchDataset", "PaddedBatchDataset", "ParallelBatchDataset")
_NEEDLESS = ("Shuffle", "Cache", "Prefetch")
_PASSING = (*_NEEDLESS, "Repeat", "Take", "Skip", "Options", "AssertCardinality", "Shard")


class DatasetGraph:
    """The operations of a data set.

    Args:
      dataset: What to describe. Random state does not come along: a shuffle starts afresh wherever the data set is
        rebuilt.
    """

    def __init__(self, dataset: tf.data.Dataset):
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # IGNORE
            strip_device_assignment=True,
        )
        self.element_spec = dataset.element_spec
        self._graph = tf.compat.v1.GraphDef.FromString(text.numpy())
        self._forget_resources()

    @property
    def lives_in_python(self) -> bool:
        """True if the data set depends on this process: on a generator, `tf.py_function`, or a variable in a map."""
        return any(node.op in _LOCAL_OPERATIONS for nodes in self._bodies() for node in nodes)

    @property
    def caches(self) -> bool:
        """True if the data set caches elements for later passes."""
        return any(node.op.startswith("CacheDataset") for nodes in self._bodies() for node in nodes)

    @property
    def has_even_batches(self) -> bool:
        """True if all components of a batch surely have the same number of examples: `batch` made them."""
        nodes = {node.name: node for node in self._graph.node}
        node = next(node for node in self._graph.node if node.op == "_Retval")
        while node.op == "_Retval" or node.op.startswith(_PASSING):
            node = nodes[node.input[0].split(":")[0]]
        return node.op.startswith(_BATCHING)

    def without_shuffles(self) -> tf.Tensor:
        """The same as `serialize`, in an order that is found at once: no buffer has to be filled."""
        graph = tf.compat.v1.GraphDef()
        graph.CopyFrom(self._graph)
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            for position, name in enumerate(node.input):
                while name.split(":")[0] in nodes and nodes[name.split(":")[0]].op.startswith(_NEEDLESS):
                    name = nodes[name.split(":")[0]].input[0]
                node.input[position] = name
        return tf.constant(graph.SerializeToString())

    @property
    def num_bytes(self) -> int:
        """Its size on the wire."""
        return self._graph.ByteSize()

    def agree_on_order(self, seed: int) -> None:
        """Fixes what is left to chance, so that all who rebuild the data set see the same order.

        Random operations without a seed get one, and parallel ones may no longer give out whatever is ready first.
        """
        draw = random.Random(seed)
        for nodes in self._bodies():
            constants = {node.name: node for node in nodes if node.op == "Const"}
            for node in nodes:
                if "deterministic" in node.attr and node.attr["deterministic"].s:
                    node.attr["deterministic"].s = b"true"
                if node.op in _SEED_INPUTS:
                    _seed_inputs(node, constants, draw)
                elif "seed" in node.attr and "seed2" in node.attr and not (node.attr["seed"].i or node.attr["seed2"].i):
                    node.attr["seed"].i, node.attr["seed2"].i = _draw(draw), _draw(draw)

    def _forget_resources(self) -> None:
        """Lets whoever rebuilds the data set make its random state and its caches anew.

        They are referred to by a name with a running number in it. In another process that number may belong to
        another data set, whose order or even whose cached elements would be taken.
        """
        unique = secrets.token_hex(8)
        for nodes in self._bodies():
            for node in nodes:
                if node.op == "Const":
                    for handle in node.attr["value"].tensor.resource_handle_val:
                        handle.name = f"{handle.name}_{unique}"

    def serialize(self) -> tf.Tensor:
        """A string scalar from which `rebuild` makes the data set again."""
        return tf.constant(self._graph.SerializeToString())

    def _bodies(self) -> Iterable[Any]:
        yield self._graph.node
        for function in self._graph.library.function:
            yield function.node_def


def rebuild(graph: tf.Tensor, element_spec: Any) -> tf.data.Dataset:
    """The data set that `DatasetGraph.serialize` wrote."""
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def _seed_inputs(node: Any, constants: dict[str, Any], draw: random.Random) -> None:
    names = [node.input[position].split(":")[0] for position in _SEED_INPUTS[node.op]]
    seeds = [constants[name] for name in names if name in constants]
    if len(seeds) < len(names) or any(_value(seed) for seed in seeds):
        return
    for seed in seeds:
        tensor = seed.attr["value"].tensor
        tensor.ClearField("tensor_content")
        del tensor.int64_val[:]
        tensor.int64_val.append(_draw(draw))


def _value(constant: Any) -> int:
    return int(tf.make_ndarray(constant.attr["value"].tensor))


def _draw(draw: random.Random) -> int:
    return draw.randrange(1, 2**31)
