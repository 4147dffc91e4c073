# SPDX-License-Identifier: Apache-2.0
"""A data set sent as text is the same data set, in the same order for all who were told so."""

from __future__ import annotations

import itertools
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.tensorflow import context
from tfdist.passes.dataset_graph import DatasetGraph, rebuild

pytestmark = pytest.mark.devices

Make = Callable[[], tf.data.Dataset]


def numbers(dataset: tf.data.Dataset) -> list[int]:
    return [int(value) for batch in dataset for value in np.ravel(tf.nest.flatten(batch)[0])]


def copies(dataset: tf.data.Dataset, seed: int | None = 5, count: int = 2) -> list[tf.data.Dataset]:
    graph = DatasetGraph(dataset)
    if seed is not None:
        graph.agree_on_order(seed)
    return [rebuild(graph.serialize(), graph.element_spec) for _ in range(count)]


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(50).shuffle(50).batch(4)


UNSEEDED: dict[str, Make] = {
    "shuffle": shuffled,
    "shuffle of arrays": lambda: tf.data.Dataset.from_tensor_slices(np.arange(50)).shuffle(50).batch(4),
    "shuffle and repeat": lambda: tf.data.Dataset.range(20).shuffle(20).repeat(3),
    "two shuffles": lambda: tf.data.Dataset.range(50).shuffle(50).batch(5).shuffle(10),
    "shuffle in a flat_map": lambda: tf.data.Dataset.range(3).flat_map(
        lambda i: tf.data.Dataset.range(i * 100, i * 100 + 20).shuffle(20)
    ),
    "shuffle in an interleave": lambda: tf.data.Dataset.range(3).interleave(
        lambda i: tf.data.Dataset.range(i * 100, i * 100 + 20).shuffle(20), cycle_length=2
    ),
    "random numbers": lambda: tf.data.Dataset.random().map(lambda x: x % 1000).take(40),
    "random numbers in a map": lambda: tf.data.Dataset.range(40).map(
        lambda i: tf.random.uniform([], 0, 10**6, tf.int64)
    ),
    "random numbers in a filter": lambda: tf.data.Dataset.range(200).filter(lambda i: tf.random.uniform([]) < 0.5),
    "sampled from two": lambda: tf.data.Dataset.sample_from_datasets(
        [tf.data.Dataset.range(40), tf.data.Dataset.range(100, 140)], [0.5, 0.5]
    ),
    "rejected at random": lambda: (
        tf.data.Dataset.range(100)
        .rejection_resample(lambda i: tf.cast(i % 2, tf.int32), [0.5, 0.5], [0.5, 0.5])
        .map(lambda kind, i: i)
    ),
}


@pytest.mark.parametrize("make", UNSEEDED.values(), ids=UNSEEDED)
def test_two_rebuilt_copies_have_the_same_order(make: Make) -> None:
    first, second = (numbers(copy) for copy in copies(make()))
    assert first == second


@pytest.mark.parametrize("name", [name for name in UNSEEDED if name != "rejected at random"])
def test_another_seed_is_another_order(name: str) -> None:
    dataset = UNSEEDED[name]()
    assert numbers(copies(dataset, seed=1)[0]) != numbers(copies(dataset, seed=2)[0])


@pytest.mark.parametrize("name", [name for name in UNSEEDED if "shuffle" in name])
def test_the_elements_are_those_of_the_original(name: str) -> None:
    dataset = UNSEEDED[name]()
    for copy in copies(dataset):
        assert sorted(numbers(copy)) == sorted(numbers(dataset))


def test_each_pass_is_shuffled_anew_and_alike_in_every_copy() -> None:
    first, second = copies(shuffled())
    passes = [(numbers(first), numbers(second)) for _ in range(3)]
    assert all(one == other for one, other in passes)
    assert len({tuple(one) for one, _ in passes}) == 3


def test_an_original_that_was_read_changes_nothing_in_the_copies() -> None:
    dataset = shuffled()
    first = numbers(copies(dataset, count=1)[0])
    numbers(dataset)
    assert numbers(copies(dataset, count=1)[0]) == first


def test_copies_share_no_cache_with_each_other_or_the_original() -> None:
    dataset = tf.data.Dataset.range(20).map(lambda i: tf.random.uniform([], 0, 10**9, tf.int64)).cache()
    first, second = copies(dataset, seed=None)
    found = [numbers(each) for each in (dataset, first, second)]
    assert len({tuple(each) for each in found}) == 3
    assert [numbers(each) for each in (dataset, first, second)] == found


def test_a_seed_of_the_user_stays_as_it_is() -> None:
    dataset = tf.data.Dataset.range(50).shuffle(50, seed=7)
    assert numbers(copies(dataset, seed=1)[0]) == numbers(copies(dataset, seed=2)[0])


def test_a_global_seed_stays_as_it_is() -> None:
    tf.random.set_seed(3)
    try:
        dataset = shuffled()
    finally:
        tf.random.set_seed(None)
    assert numbers(copies(dataset, seed=1)[0]) == numbers(copies(dataset, seed=2)[0])


REBUILD = """
import sys, numpy as np, tensorflow as tf
from tfdist.compat.tensorflow import context
from tfdist.passes.dataset_graph import rebuild
text = tf.constant(open(sys.argv[1], "rb").read())
for _ in range(2):
    print(*(int(v) for batch in rebuild(text, tf.TensorSpec([None], tf.int64)) for v in batch.numpy()))
"""


@pytest.mark.processes
def test_another_process_sees_the_same_order(tmp_path: pathlib.Path) -> None:
    graph = DatasetGraph(shuffled())
    graph.agree_on_order(11)
    path = tmp_path / "graph"
    path.write_bytes(graph.serialize().numpy())
    command = [sys.executable, "-c", REBUILD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    here = numbers(rebuild(graph.serialize(), graph.element_spec))
    assert [[int(number) for number in line.split()] for line in done.stdout.splitlines()] == [here, here]


@pytest.mark.parametrize("make", UNSEEDED.values(), ids=UNSEEDED)
def test_shards_of_an_agreed_order_are_the_whole(make: Make) -> None:
    dataset = make()
    parts = copies(dataset, count=3)
    shares = [numbers(part.shard(3, index)) for index, part in enumerate(parts)]
    assert sorted(itertools.chain(*shares)) == sorted(numbers(copies(dataset, count=1)[0]))


SLOPPY: dict[str, Make] = {
    "option": lambda: _sloppy(_uneven(tf.data.Dataset.range(300), None)),
    "argument of map": lambda: _uneven(tf.data.Dataset.range(300), False),
    "argument of interleave": lambda: tf.data.Dataset.range(6).interleave(
        lambda i: _uneven(tf.data.Dataset.range(i * 100, i * 100 + 40), None),
        cycle_length=3,
        num_parallel_calls=3,
        deterministic=False,
    ),
}


def _uneven(dataset: tf.data.Dataset, deterministic: bool | None) -> tf.data.Dataset:
    def cost(i: tf.Tensor) -> tf.Tensor:
        size = tf.where(i % 7 == 0, 300, 1)
        return i + tf.cast(tf.reduce_sum(tf.zeros([size, size])), tf.int64)

    return dataset.map(cost, num_parallel_calls=4, deterministic=deterministic)


def _sloppy(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


@pytest.mark.parametrize("make", SLOPPY.values(), ids=SLOPPY)
def test_an_order_left_open_by_the_user_is_fixed_where_all_have_to_agree(make: Make) -> None:
    for _ in range(3):
        first, second = (numbers(copy) for copy in copies(make()))
        assert first == second


# What can be sent.


def python_generator() -> Any:
    yield from range(5)


LOCAL: dict[str, Make] = {
    "generator": lambda: tf.data.Dataset.from_generator(python_generator, output_signature=tf.TensorSpec([], tf.int64)),
    "py_function": lambda: tf.data.Dataset.range(5).map(lambda i: tf.py_function(lambda x: x, [i], tf.int64)),
    "numpy_function": lambda: tf.data.Dataset.range(5).map(lambda i: tf.numpy_function(lambda x: x, [i], tf.int64)),
    "variable": lambda: _plus(tf.Variable(3, dtype=tf.int64)),
    "behind other steps": lambda: (
        tf.data.Dataset.range(5).map(lambda i: tf.py_function(lambda x: x, [i], tf.int64)).batch(2).prefetch(1)
    ),
    "in a flat_map": lambda: tf.data.Dataset.range(2).flat_map(
        lambda _: tf.data.Dataset.range(5).map(lambda i: tf.py_function(lambda x: x, [i], tf.int64))
    ),
}


def _plus(variable: tf.Variable) -> tf.data.Dataset:
    return tf.data.Dataset.range(5).map(lambda i: i + variable)


@pytest.mark.parametrize("make", LOCAL.values(), ids=LOCAL)
def test_what_can_not_leave_this_process_is_noticed(make: Make) -> None:
    assert DatasetGraph(make()).lives_in_python


@pytest.mark.parametrize("make", UNSEEDED.values(), ids=UNSEEDED)
def test_a_data_set_without_python_can_be_sent(make: Make) -> None:
    assert not DatasetGraph(make()).lives_in_python


def test_an_order_that_lasts_in_this_process_is_noticed() -> None:
    once, again = (tf.data.Dataset.range(9).shuffle(9, reshuffle_each_iteration=each) for each in (False, True))
    seeded = tf.data.Dataset.range(9).shuffle(9, seed=3, reshuffle_each_iteration=False)
    assert all(DatasetGraph(each).keeps_own_order for each in (once.take(5).batch(2), again.cache().skip(5)))
    for each in (seeded.take(5), again.take(5), again.cache().batch(2), again.take(5).cache()):
        assert not DatasetGraph(each).keeps_own_order


STRUCTURES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"a": np.arange(6), "b": np.arange(12.0).reshape(6, 2)},
    "tuple": lambda: (np.arange(6), {"x": np.arange(6.0)}),
    "strings": lambda: np.array(["a", "b", "c"]),
    "ragged": lambda: tf.ragged.constant([[1, 2], [3], []]),
    "sparse": lambda: tf.sparse.from_dense([[0, 1], [2, 0], [0, 0]]),
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_structures_come_through(make: Callable[[], Any]) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(make()).batch(2)
    (copy,) = copies(dataset, count=1)
    assert copy.element_spec == dataset.element_spec
    for one, other in zip(copy, dataset, strict=True):
        for left, right in zip(
            tf.nest.flatten(one, expand_composites=True), tf.nest.flatten(other, expand_composites=True), strict=True
        ):
            np.testing.assert_array_equal(left, right)


def test_the_size_counts_the_data() -> None:
    small, large = (DatasetGraph(tf.data.Dataset.from_tensor_slices(np.zeros(n))) for n in (10, 100_000))
    assert small.num_bytes < 100_000 < 800_000 < large.num_bytes < 900_000


def test_a_table_in_the_data_set_comes_through() -> None:
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64)), -1
    )
    dataset = tf.data.Dataset.from_tensor_slices(["b", "a", "z"]).map(table.lookup)
    (copy,) = copies(dataset, count=1)
    assert numbers(copy) == [2, 1, -1]


def test_fingerprint_of_data_sets_made_alike_is_one() -> None:
    def make(shards: int = 1, factor: int = 2, seed: int | None = None, name: str = "a") -> tf.data.Dataset:
        mapped = tf.data.Dataset.range(8).shard(shards, 0).map(lambda x: factor * x).cache().shuffle(8, seed=seed)
        read = tf.data.Dataset.from_tensors(name).interleave(tf.data.TextLineDataset)
        return tf.data.Dataset.zip((mapped, read)).batch(2)

    first = DatasetGraph(make()).fingerprint()
    with tf.device("CPU:1"):
        assert DatasetGraph(make(seed=3)).fingerprint() == first
    for other in (make(shards=2), make(factor=3), make(name="b")):
        assert DatasetGraph(other).fingerprint() != first


def test_shuffle_with_a_seed_keeps_its_order_beside_a_drawn_seed() -> None:
    order = numbers(tf.data.Dataset.range(20).shuffle(20, seed=3))
    context.set_drawn_seed(7)
    assert numbers(tf.data.Dataset.range(20).shuffle(20, seed=3)) == order
    unseeded = [numbers(tf.data.Dataset.range(20).shuffle(20)), numbers(tf.data.Dataset.range(20).shuffle(20))]
    context.set_drawn_seed(8)
    context.set_drawn_seed(7)
    assert [numbers(tf.data.Dataset.range(20).shuffle(20)), numbers(tf.data.Dataset.range(20).shuffle(20))] == unseeded
    tf.random.set_seed(5)
    assert numbers(tf.data.Dataset.range(20).shuffle(20, seed=3)) != order
