# SPDX-License-Identifier: Apache-2.0
"""A data set as text that can be sent to the workers, and what has to be known about it before it goes."""

from __future__ import annotations

import functools
import hashlib
import random
import secrets
from collections.abc import Callable, Iterable
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
_HANDLES = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)
# Data sets of one input, which they have read to its end when they are at theirs. They may stand behind a cache.
_EXHAUSTING = (
    *("BatchDataset", "PaddedBatchDataset", "ParallelBatchDataset", "Shuffle", "Prefetch", "Map", "ParallelMap"),
    *("Filter", "Repeat", "Skip", "Options", "AssertCardinality", "Shard"),
)


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
    def keeps_own_order(self) -> bool:
        """True if an order lasts that only this process knows: of a shuffle without a seed that is not done again.

        Or that is cached, and of which a part is taken: in a split by `take` and `skip` no example is in both parts.
        """
        constants = {node.name: node for node in self._graph.node if node.op == "Const"}
        shuffles = [node for node in self._graph.node if node.op.startswith("Shuffle")]
        drawn = [node for node in shuffles if (seeds := _seeds(node, constants)) and not any(map(_value, seeds))]
        if not all(node.attr["reshuffle_each_iteration"].b for node in drawn):
            return True
        names, sources = {node.name for node in drawn}, self._sources
        caches = [node.name for node in self._graph.node if node.op.startswith("CacheDataset")]
        cached = {name for name in caches if not names.isdisjoint(sources[name])}
        parts = [node.name for node in self._graph.node if node.op in ("TakeDataset", "SkipDataset", "ShardDataset")]
        return any(not cached.isdisjoint(sources[name]) for name in parts)

    @property
    def is_generated(self) -> bool:
        """True if its elements come from a Python generator, of which the operations say nothing."""
        return any(node.op == "GeneratorDataset" for nodes in self._bodies() for node in nodes)

    @property
    def has_shard_hints(self) -> bool:
        """True if `dataset.shard(tf.data.experimental.SHARD_HINT, ...)` leaves the number of shards to TensorFlow."""
        for nodes in map(list, self._bodies()):
            constants = {node.name: node for node in nodes if node.op == "Const"}
            counts = [node.input[1].split(":")[0] for node in nodes if node.op == "ShardDataset"]
            if any(name in constants and _value(constants[name]) == tf.data.experimental.SHARD_HINT for name in counts):
                return True
        return False

    @property
    def caches(self) -> bool:
        """True if the data set caches elements for later passes."""
        return any(node.op.startswith("CacheDataset") for nodes in self._bodies() for node in nodes)

    @functools.cached_property
    def can_fill_cache(self) -> bool:
        """True if it caches, and what `rebuilder` reads to fill the cache draws no order, or some that are cached."""
        is_alone = self._filled().op.startswith("CacheDataset")
        cached = {node.op for function in self._graph.library.function for node in function.node_def}
        operations, sources = {node.name: node.op for node in self._graph.node}, self._sources
        for name, operation in operations.items():
            cached |= {operations[each] for each in sources[name]} if operation.startswith("CacheDataset") else set()
        return self.caches and (is_alone or not self.shuffles or not cached.isdisjoint(_SEED_INPUTS))

    @functools.cached_property
    def shuffles(self) -> bool:
        """True if each iterator over the data set draws an order, or numbers, that depend on those before."""
        return any(node.op in _SEED_INPUTS for nodes in self._bodies() for node in nodes)

    @functools.cached_property
    def _sources(self) -> dict[str, set[str]]:
        """Returns, for each operation by its name, itself and all that it is computed from."""
        found: dict[str, set[str]] = {}
        for node in self._graph.node:  # Each comes after those that it reads.
            # "^" is before those that it waits for, such as the content of a lookup table.
            found[node.name] = {node.name}.union(*(found[name.lstrip("^").split(":")[0]] for name in node.input))
        return found

    def _filled(self) -> Any:
        """Returns the last operation that need not be read to its end when the data set is."""
        nodes = {node.name: node for node in self._graph.node}
        node = next(node for node in self._graph.node if node.op == "_Retval")
        while node.op == "_Retval" or node.op.startswith(_EXHAUSTING):
            node = nodes[node.input[0].split(":")[0]]
        return node

    @property
    def num_bytes(self) -> int:
        """Size of the graph on the wire."""
        return self._graph.ByteSize()

    def agree_on_order(self, seed: int) -> None:
        """Fixes what is left to chance, so that all who rebuild the data set see the same order.

        Random operations without a seed get one, and parallel ones may no longer give out whatever is ready first.
        """
        draw = functools.partial(random.Random(seed).randrange, 1, 2**31)
        for nodes in self._bodies():
            constants = {node.name: node for node in nodes if node.op == "Const"}
            for node in nodes:
                if "deterministic" in node.attr and node.attr["deterministic"].s:
                    node.attr["deterministic"].s = b"true"
                if node.op in _SEED_INPUTS:
                    _seed_inputs(node, constants, draw)
                elif "seed" in node.attr and "seed2" in node.attr and not (node.attr["seed"].i or node.attr["seed2"].i):
                    node.attr["seed"].i, node.attr["seed2"].i = draw(), draw()

    def fingerprint(self) -> str:
        """Returns text that differs where operations, constants, arrays or file names differ.

        Seeds don't count, and neither do devices and the names of functions, tables, caches and random state.
        (`tf.data.Dataset.fingerprint` gives another number each time where functions are mapped.)
        """
        found = []
        for nodes in map(list, self._bodies()):
            seeds = {node.input[position].split(":")[0] for node in nodes for position in _SEED_INPUTS.get(node.op, ())}
            for node in nodes:
                digest = hashlib.blake2b(node.op.encode(), digest_size=16)
                if node.op == "Const" and node.name not in seeds and node.attr["dtype"].type not in _HANDLES:
                    digest.update(node.attr["value"].SerializeToString(deterministic=True))
                found.append(digest.digest())
        # In any order: that of functions depends on their names.
        return hashlib.blake2b(b"".join(sorted(found)), digest_size=16).hexdigest()

    def _forget_resources(self) -> None:
        """Makes a rebuilt data set create its random state and its caches anew.

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

    def rebuilder(self) -> Callable[[], tuple[tf.data.Dataset, ...]]:
        """Returns a function that makes the data set again, what is to be read to fill its cache, and `_below`.

        The second is the cache alone, so that no shuffle behind it draws an order; unless a pass may not read all of
        it.
        """
        graph, cache = tf.compat.v1.GraphDef(), self._filled()
        graph.CopyFrom(self._graph)
        end = next(node for node in graph.node if node.op == "_Retval")
        specs, names = [tf.data.DatasetSpec(self.element_spec)] * 2, [end.input[0]] * 2
        if cache.op.startswith("CacheDataset"):
            specs[1], names[1] = _spec(cache), cache.name
        below = self._below()
        specs += map(_spec, below)
        names += [node.name for node in below]
        together = graph.node.add(name="rebuilt", op="TensorDataset", input=names)
        together.attr["Toutput_types"].list.type.extend([tf.variant.as_datatype_enum] * len(names))
        together.attr["output_shapes"].list.shape.extend([tf.TensorShape([]).as_proto()] * len(names))
        end.input[0] = together.name
        text = tf.constant(graph.SerializeToString())
        return lambda: rebuild(text, tuple(specs)).get_single_element()

    def _below(self) -> list[Any]:
        """Returns what shuffles read that is shuffled itself: it draws an order when their first element is read."""
        nodes, sources = {node.name: node for node in self._graph.node}, self._sources
        read = [nodes[node.input[0].split(":")[0]] for node in nodes.values() if node.op.startswith("Shuffle")]
        shuffled = {name for name, node in nodes.items() if node.op.startswith("Shuffle")}
        return [] if self.caches else [node for node in read if not shuffled.isdisjoint(sources[node.name])]

    def _bodies(self) -> Iterable[Any]:
        """Yields the nodes of the graph, and those of each of its functions."""
        yield self._graph.node
        for function in self._graph.library.function:
            yield function.node_def


def rebuild(graph: tf.Tensor, element_spec: Any) -> tf.data.Dataset:
    """The data set that `DatasetGraph.serialize` wrote."""
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def _spec(node: Any) -> tf.data.DatasetSpec:
    """The elements of an operation that makes a data set."""
    types = node.attr["output_types" if "output_types" in node.attr else "Toutput_types"].list.type
    return tf.data.DatasetSpec(tuple(map(tf.TensorSpec, node.attr["output_shapes"].list.shape, types)))


def _seed_inputs(node: Any, constants: dict[str, Any], draw: Callable[[], int]) -> None:
    seeds = _seeds(node, constants)
    if seeds and not any(map(_value, seeds)):
        for seed in seeds:
            seed.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(draw(), tf.int64))


def _seeds(node: Any, constants: dict[str, Any]) -> list[Any]:
    """Returns the two seeds of an operation; none if they are computed."""
    names = [node.input[position].split(":")[0] for position in _SEED_INPUTS[node.op]]
    return [constants[name] for name in names] if constants.keys() >= set(names) else []


def _value(constant: Any) -> int:
    return int(tf.make_ndarray(constant.attr["value"].tensor))
