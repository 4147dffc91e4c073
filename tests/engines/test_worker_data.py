# SPDX-License-Identifier: Apache-2.0
"""Batches that each worker reads, and handles that the chief's loop sees."""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fake_cluster import as_worker, running_engine
from tensorflow.core.framework import dataset_options_pb2

from tfdist.compat.tensorflow import coordinator
from tfdist.engines.asynchronous import AsynchronousEngine
from tfdist.passes.dataset_graph import DatasetGraph, rebuild
from tfdist.passes.handle import DistributedDataset
from tfdist.passes.worker_dataset import Pass, WorkerDataset, WorkerDatasetFromFunction
from tfdist.passes.worker_pass import ChiefFeed, WorkerFeed, WorkerIterator

pytestmark = pytest.mark.devices

WORKERS = 3


@pytest.fixture
def engine() -> Iterator[AsynchronousEngine]:
    with running_engine(WORKERS) as (engine, _):
        yield engine


def numbers(count: int = 10) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).batch(1)


def from_python(count: int = 4) -> tf.data.Dataset:
    return numbers(count).map(lambda i: tf.ensure_shape(tf.py_function(lambda i: i, [i], tf.int64), [None]))


def read(dataset: WorkerDataset) -> list[list[int]]:
    """Returns the batches that each worker would read in one pass."""
    return [
        [int(value) for batch in share for value in batch]
        for share in dataset.iterate_on_workers(Pass(dataset.begin_pass())).values
    ]


# Shares.


def test_shards_take_batches_by_turns(engine: AsynchronousEngine) -> None:
    dataset = WorkerDataset(engine, numbers(), "shard")
    assert read(dataset) == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [dataset.share(worker) for worker in range(WORKERS)] == [4, 3, 3]


def test_shards_of_shuffled_data_are_the_whole_in_every_pass(engine: AsynchronousEngine) -> None:
    dataset = WorkerDataset(engine, tf.data.Dataset.range(20).shuffle(20).batch(2), "shard")
    passes = [read(dataset) for _ in range(3)]
    assert all(sorted(itertools.chain(*shares)) == list(range(20)) for shares in passes)
    assert len({str(shares) for shares in passes}) == 3


def is_tuned(dataset: tf.data.Dataset) -> bool | None:
    """What a worker is told that rebuilds the data set: the user's word, or None."""
    text = DatasetGraph(dataset).serialize()
    variant = tf.data.experimental.to_variant(rebuild(text, dataset.element_spec))
    told = dataset_options_pb2.Options.FromString(tf.raw_ops.GetOptions(input_dataset=variant).numpy())
    return told.autotune_options.enabled if told.autotune_options.WhichOneof("optional_enabled") else None


@pytest.mark.parametrize("made", ["by one", "for each worker"])
def test_no_worker_tunes_its_share_but_where_the_user_wants_it(engine: AsynchronousEngine, made: str) -> None:
    """Who deletes an iterator may wait a minute for the thread that tunes, and all others for him."""

    def distributed(dataset: tf.data.Dataset) -> WorkerDataset:
        if made == "by one":
            return WorkerDataset(engine, dataset, "shard")
        return WorkerDatasetFromFunction(engine, [dataset] * WORKERS)

    assert is_tuned(numbers()) is None
    untuned = distributed(numbers())
    assert is_tuned(untuned.own) is False
    assert is_tuned(untuned.after(passes=1, batches=3).own) is False
    options = tf.data.Options()
    options.autotune.enabled = True
    assert is_tuned(distributed(numbers().with_options(options)).own) is True


def orders_on_one_device(dataset: tf.data.Dataset, count: int) -> list[list[list[int]]]:
    """The batches of so many iterators, whose elements are sorted: workers have parts of them."""
    return [[sorted(batch) for batch in dataset.as_numpy_iterator()] for _ in range(count)]


def shuffled(caches: bool = False) -> tf.data.Dataset:
    data = tf.data.Dataset.range(24)
    return (data.cache() if caches else data).shuffle(24, seed=3).batch(6)


def read_batches(dataset: WorkerDataset, number: int) -> list[list[list[int]]]:
    """Returns the first batches, each as its elements, that each worker would read in a pass."""
    shares = dataset.iterate_on_workers(Pass(number)).values
    batches = [[tf.nest.flatten(each)[0] for each in itertools.islice(share, 4)] for share in shares]
    return [[batch.numpy().tolist() for batch in each] for each in batches]


def by_turns(shares: list[list[list[int]]]) -> list[list[int]]:
    """The four batches of which workers have read every third, each with its elements sorted."""
    return [sorted(shares[batch % WORKERS][batch // WORKERS]) for batch in range(4)]


@pytest.mark.parametrize("make", [shuffled, lambda: shuffled(True), lambda: shuffled(True).take(4)])
@pytest.mark.parametrize("sharding", ["shard", "deal"])
def test_order_of_a_pass_is_that_of_one_device(engine: AsynchronousEngine, sharding: str, make: Any) -> None:
    """Keras makes an iterator between epochs that it never reads."""
    dataset, expected = WorkerDataset(engine, make(), sharding), orders_on_one_device(shuffled(), 4)
    for number in (1, 3, 4):
        while dataset.begin_pass() < number:
            pass
        shares = read_batches(dataset, number)
        if sharding == "shard":
            batches = by_turns(shares)
        else:
            batches = [sorted(itertools.chain(*(share[batch] for share in shares))) for batch in range(4)]
        assert batches == expected[number - 1]


def test_data_sets_made_of_one_shuffle_share_its_orders(engine: AsynchronousEngine) -> None:
    source, expected = shuffled(), orders_on_one_device(shuffled(), 3)
    made = [source, source.take(4), source]
    for number, each in enumerate(made):
        dataset = WorkerDataset(engine, each, "shard")
        assert by_turns(read_batches(dataset, dataset.begin_pass())) == expected[number]


def test_order_that_the_chief_reads_is_that_of_one_device(engine: AsynchronousEngine) -> None:
    dataset, expected = WorkerDataset(engine, shuffled().take(2), "shard"), orders_on_one_device(shuffled(), 4)
    iterators = [iter(dataset) for _ in range(3)]
    for number in (1, 3):
        iterators[number - 1].decide(by_chief=True)
        assert [sorted(np.asarray(batch)) for batch in iterators[number - 1]] == expected[number - 1][:2]
    assert [sorted(np.asarray(batch)) for batch in iter(dataset)] == expected[3][:2]


def doubled(keys: tf.Tensor) -> tf.Tensor:
    """Maps numbers by a lookup table, as text layers do."""
    with tf.init_scope():
        found = tf.range(30, dtype=tf.int64)
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(found, 2 * found), -1)
    return table.lookup(keys)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: data.shuffle(30).batch(2),
        lambda data: data.batch(2).shuffle(15),
        lambda data: data.shuffle(30).cache().batch(2),
        lambda data: data.cache().shuffle(30, seed=3).batch(2),
        lambda data: data.shuffle(30).map(lambda i: (i,)).shuffle(6).map(lambda i: i).padded_batch(2).shuffle(3),
        lambda data: data.map(doubled).shuffle(30).batch(2),
        lambda data: data.batch(2),
    ],
    ids=["examples", "batches", "shuffled, then cached", "cached, then shuffled", "again", "looked up", "in order"],
)
def test_rest_of_a_share_has_the_order_of_the_pass(
    engine: AsynchronousEngine, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]
) -> None:
    create, created, taken = coordinator.create_on_workers, [], collections.Counter()

    def recorded(coordinator: Any, function: Callable[..., Any], *args: Any) -> Any:
        created.append(function)
        return create(coordinator, function, *args)

    monkeypatch.setattr(coordinator, "create_on_workers", recorded)
    dataset = WorkerDataset(engine, make(tf.data.Dataset.range(30)), "shard")
    for _ in range(3):
        opened = Pass(dataset.begin_pass())
        shares = dataset.iterate_on_workers(opened, lambda worker: taken[worker]).values
        read = [[batch.numpy().tolist() for batch in share] for share in shares]
    build, *_, iterate = created
    taken[1] = 2
    with as_worker(1):  # what the coordinator does for a worker that is back
        again = [batch.numpy().tolist() for batch in iterate(build())]
    assert again == read[1][2:]
    with as_worker(0):  # and another worker, for one that is not
        taken_over = [batch.numpy().tolist() for batch in dataset.iterate_piece(opened, 1, 1, 2)]
    assert taken_over == read[1][1::2]


def shuffled_again(again: int = 5) -> tf.data.Dataset:
    once = tf.data.Dataset.range(30).shuffle(30, seed=3).batch(2)
    if again < 0:  # of unknown length
        return once.filter(lambda _: True).cache()
    return once.shuffle(again, seed=4) if again else once


def in_order(shares: list[list[int]]) -> list[int]:
    pairs = [[share[at : at + 2] for at in range(0, len(share), 2)] for share in shares]
    return [number for turn in itertools.zip_longest(*pairs, fillvalue=()) for pair in turn for number in pair]


@pytest.mark.parametrize(("again", "batches"), [(0, 1), (5, 1), (5, 0), (-1, 1), (-1, 0)])
def test_a_resumed_pass_and_those_after_it_have_their_orders(
    engine: AsynchronousEngine, again: int, batches: int
) -> None:
    whole, resumed = (WorkerDataset(engine, shuffled_again(again), "shard") for _ in range(2))
    passes = [in_order(read(whole)) for _ in range(4)]
    resumed.draw_below(2)
    rest = resumed.after(passes=2, batches=batches)
    if batches:
        assert in_order(read(rest)) == passes[2][2:]
    assert in_order(read(resumed)) == passes[3 if batches else 2]


@pytest.mark.parametrize("how", ["taken over", "lost", "unread"])
def test_passes_after_one_that_not_all_have_read_have_their_orders(engine: AsynchronousEngine, how: str) -> None:
    expected = WorkerDataset(engine, shuffled_again(), "shard")
    passes = [in_order(read(expected)) for _ in range(5)]
    dataset = WorkerDataset(engine, shuffled_again(), "shard")
    assert in_order(read(dataset)) == passes[0]
    feed = WorkerFeed(dataset, dataset.begin_pass())
    shares = [list(share) for share in feed.begin().values[: 0 if how == "taken over" else 2]]
    for worker in range(len(shares)):
        feed.pieces.used(worker, 5)
    if how == "lost":
        feed.pieces.used(2)
        feed.release(2)
    if how == "taken over":
        feed.pieces.wait_for_claims()
        for _ in range(WORKERS):
            piece: Any = feed.claim(0, tuple)
            with as_worker(0):
                shares.append(list(feed.opened(0, piece)))
            feed.pieces.end(0)
        assert in_order([[int(each) for batch in share for each in batch] for share in shares]) == passes[1]
    assert [in_order(read(dataset)) for _ in range(3)] == passes[2:]


def test_workers_have_one_order_after_one_has_read_more_than_its_part(engine: AsynchronousEngine) -> None:
    """It contributes twice to an update from which another contribution was withdrawn."""
    dataset, expected = WorkerDataset(engine, shuffled(), "deal"), orders_on_one_device(shuffled(), 4)
    feed = WorkerFeed(dataset, dataset.begin_pass())
    feed.updates = 4
    for worker, share in enumerate(feed.begin().values):
        for _ in itertools.islice(share, 4 + worker):
            feed.took(worker)
    for order in expected[1:]:
        shares = read_batches(dataset, dataset.begin_pass())
        assert [sorted(itertools.chain(*(share[batch] for share in shares))) for batch in range(4)] == order


def test_replicas_read_all_of_it(engine: AsynchronousEngine) -> None:
    dataset = WorkerDataset(engine, numbers(4), "replicate")
    assert read(dataset) == [[0, 1, 2, 3]] * WORKERS
    assert dataset.share(2) == 4


def test_data_given_for_each_worker(engine: AsynchronousEngine) -> None:
    dataset = WorkerDatasetFromFunction(engine, [numbers(1), numbers(3), numbers(0)])
    assert read(dataset) == [[0], [0, 1, 2], []]
    assert [dataset.share(worker) for worker in range(WORKERS)] == [1, 3, 0]
    assert dataset.cardinality == 4


@pytest.mark.parametrize(
    ("make", "sharding", "share"),
    [
        (lambda: numbers().repeat(), "shard", sys.maxsize),
        (lambda: numbers().repeat(), "replicate", sys.maxsize),
        (lambda: numbers().filter(lambda i: True), "shard", None),
        (lambda: numbers(1), "shard", 0),
    ],
    ids=["endless shards", "endless replicas", "unknown", "more workers than batches"],
)
def test_how_much_is_known_of_a_share(engine: AsynchronousEngine, make: Any, sharding: str, share: int | None) -> None:
    assert WorkerDataset(engine, make(), sharding).share(2) == share


def test_data_that_do_not_fit_into_a_message_are_an_error(
    engine: AsynchronousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfdist.passes.worker_dataset._MAX_SHIPPED_BYTES", 1000)
    with pytest.raises(ValueError, match="read it from files"):
        read(WorkerDataset(engine, tf.data.Dataset.from_tensor_slices(np.zeros([1000, 1])), "shard"))


def test_it_is_described_and_sent_once(engine: AsynchronousEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, sent = WorkerDataset(engine, numbers(), "shard"), []
    original = WorkerDataset._shares
    monkeypatch.setattr(WorkerDataset, "_shares", lambda self: sent.append(1) or original(self))
    for _ in range(3):
        read(dataset)
    assert sent == [1]


# What the chief's loop sees.


def test_a_handle_leads_back_to_its_iterator(engine: AsynchronousEngine) -> None:
    iterators = [iter(WorkerDataset(engine, numbers(), "shard")) for _ in range(2)]
    assert [next(iterator).of for iterator in iterators] == iterators


def test_a_batch_unpacks_into_handles_of_its_parts(engine: AsynchronousEngine) -> None:
    pairs = numbers().map(lambda i: (i, {"b": i + 100, "a": tf.stack([i, i])}))
    batch = next(iter(WorkerDataset(engine, pairs, "shard")))
    first, rest = batch
    assert len(batch) == 2 and list(rest) == list(rest.keys()) == ["b", "a"]
    assert {part.batch for part in (first, rest, rest["a"], batch[1])} == {batch.batch}
    assert (first.dtype, rest["a"].shape.as_list()) == (tf.int64, [2, None])
    again, _ = next(iter(WorkerDataset(engine, pairs, "shard")))
    assert again.kind is first.kind, "a function is traced once for the parts of all batches"
    whole = ("first", {"a": "a", "b": "b"})
    assert (first.pick(whole), rest.pick(whole), dict(rest.items())["b"].pick(whole)) == ("first", whole[1], "b")


def test_a_batch_that_is_looked_at_first_is_read_by_the_chief(engine: AsynchronousEngine) -> None:
    iterator = iter(WorkerDataset(engine, numbers(4), "shard"))
    seen = [np.asarray(batch).tolist() for batch in iterator]
    assert seen == [[0], [1], [2], [3]]
    assert isinstance(iterator.decide(by_chief=False), ChiefFeed)


def test_a_batch_that_a_step_of_keras_has_used_has_no_value(engine: AsynchronousEngine) -> None:
    batch = next(iter(WorkerDataset(engine, numbers(4), "shard"))).batch
    batch.is_used, batch.on_worker = True, ()
    with pytest.raises(RuntimeError, match="one of Keras' own steps has used before; give it to one function"):
        batch.values()


def test_a_handle_keeps_its_pass(engine: AsynchronousEngine) -> None:
    (batch,) = [next(iter(WorkerDataset(engine, numbers(), "shard")))]
    assert int(tf.reduce_sum(tf.add(batch, 1))) == 1


def test_an_iterator_that_has_ended_ends_each_time(engine: AsynchronousEngine) -> None:
    iterator = iter(WorkerDataset(engine, numbers(3), "shard"))
    assert len(list(zip(range(5), iterator, strict=False))) == 3
    with pytest.raises(StopIteration):
        next(iter(iterator))


def test_the_last_handle_is_known_as_the_last(engine: AsynchronousEngine) -> None:
    iterator = iter(WorkerDataset(engine, numbers(3), "shard"))
    known = []
    for _ in iterator:
        known.append(iterator.is_last)
    assert known == [False, False, True]


# Who feeds.


@pytest.mark.parametrize(
    ("make", "by_chief", "reads"),
    [(numbers, False, False), (numbers, True, True), (from_python, False, True), (from_python, True, True)],
    ids=["training", "evaluation", "training from Python", "evaluation from Python"],
)
def test_who_feeds(engine: AsynchronousEngine, make: Callable[[], Any], by_chief: bool, reads: bool) -> None:
    iterator = iter(WorkerDataset(engine, make(), "shard"))
    assert isinstance(iterator.decide(by_chief), ChiefFeed) is reads
    assert isinstance(iterator.decide(not by_chief), ChiefFeed) is reads, "it is decided once"


def taken(iterator: WorkerIterator, at_most: int) -> int:
    try:
        return len(list(zip(range(at_most), iterator, strict=False)))
    except tf.errors.OutOfRangeError:
        return 0


def unknown(count: int) -> tf.data.Dataset:
    return numbers(count).filter(lambda i: True)


@pytest.mark.parametrize("make", [numbers, unknown, from_python])
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("at_once", [1, 3])
def test_the_chief_never_gives_more_handles_than_it_has_batches(
    engine: AsynchronousEngine, make: Any, count: int, at_once: int
) -> None:
    """Keras takes `at_once` handles, and then runs as many steps."""
    iterator = iter(WorkerDataset(engine, make(count), "shard"))
    feed: Any = iterator.decide(by_chief=True)
    read, last = [], []
    while True:
        given = taken(iterator, at_once)
        for _ in range(given):
            read += [int(value) for value in iterator.chief_batch(feed)[0]]
            last.append(iterator.is_last)
        if given < at_once:
            break
    assert read == list(range(count))
    assert last[-1]
    assert at_once > 1 or last == [False] * (count - 1) + [True]


def test_keras_takes_it_for_distributed_data(engine: AsynchronousEngine) -> None:
    dataset = WorkerDataset(engine, numbers(), "shard")
    assert isinstance(dataset, tf.distribute.DistributedDataset)
    assert isinstance(dataset, DistributedDataset)
    assert not isinstance(iter(dataset), tf.distribute.DistributedIterator)
