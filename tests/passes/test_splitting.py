# SPDX-License-Identifier: Apache-2.0
"""Batches of which not all components have a batch dimension are divided by nobody in silence."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import tensorflow as tf

from tfdist.passes import splitting

pytestmark = pytest.mark.devices

UNEVEN = {"table": tf.TensorSpec([3]), "x": tf.TensorSpec([None, 2])}


def batch() -> dict[str, tf.Tensor]:
    return {"table": tf.ones([3]), "x": tf.ones([6, 2])}


def test_a_lone_replica_gets_a_batch_as_it_is() -> None:
    given: Any = {**batch(), "scale": tf.constant(2.0)}
    assert splitting.cut(given, 0, 1) is given


@pytest.mark.parametrize("count", [1, 2, 3])
def test_groups_of_a_shuffled_data_set_have_each_element_once(count: int) -> None:
    dataset = tf.data.Dataset.range(12).shuffle(12).map(lambda n: {"n": tf.fill([n], n), "twice": 2 * n})
    groups = list(splitting.groups_of(dataset, count))
    assert all(len(group) == count for group in groups)
    elements = [element for group in groups for element in group]
    assert sorted(int(element["twice"]) for element in elements) == list(range(0, 24, 2))
    assert all(2 * element["n"].shape[0] == int(element["twice"]) for element in elements)


def test_groups_of_keep_pairs_and_leave_out_what_is_left_over() -> None:
    pairs = tf.data.Dataset.from_tensor_slices(([1, 2, 3], [4, 5, 6]))
    groups = splitting.groups_of(pairs, 2)
    assert [tf.nest.map_structure(int, group) for group in groups] == [((1, 4), (2, 5))]
    assert int(groups.cardinality()) == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_last_element_is_marked_by_the_shape_beside_it(count: int) -> None:
    rows = tf.data.Dataset.range(count).map(lambda n: {"n": n, "rows": tf.RaggedTensor.from_row_lengths([n], [1])})
    pairs = list(splitting.with_end_marked(rows.filter(lambda each: each["n"] >= 0)))
    assert [int(each["n"]) for each, _ in pairs] == [int(each["rows"][0, 0]) for each, _ in pairs] == list(range(count))
    assert [mark.shape[0] for _, mark in pairs] == [1] * (count - 1) + [0] * min(count, 1)


def test_components_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different batch sizes.*tf\.repeat.*Received: batch sizes \[3, 6\]"):
        splitting.check_batched({"table": tf.TensorSpec([3]), "x": tf.TensorSpec([6, 2])}, 2)


def test_components_of_an_unknown_number_of_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"an unknown number of axes.*set_shape"):
        splitting.check_batched({"x": tf.TensorSpec([6, 2]), "y": tf.TensorSpec(None)}, 2)


def test_a_batch_with_names_keeps_them() -> None:
    named = collections.namedtuple("Named", "x y")
    data = tf.data.Dataset.range(6).map(lambda n: named(n, -n)).batch(6)
    (part,) = splitting.deal(data, [1], 2)
    assert part._fields == ("x", "y")
    assert part.x.numpy().tolist() == [3, 4, 5]


def test_components_of_unknown_different_sizes_are_refused_when_they_come() -> None:
    cut = tf.function(lambda given: splitting.cut(given, 1, 2), autograph=False, input_signature=[UNEVEN])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="components of a batch have different numbers of examples"
    ):
        cut(batch())


def test_components_of_one_size_are_cut_alike() -> None:
    spec = {"table": tf.TensorSpec([None]), "x": tf.TensorSpec([None, 2])}
    cut = tf.function(lambda given: splitting.cut(given, 1, 2), autograph=False, input_signature=[spec])
    parts = cut({"table": tf.range(5.0), "x": tf.ones([5, 2])})
    assert parts["table"].numpy().tolist() == [2.0, 3.0, 4.0]
    assert parts["x"].shape == (3, 2)


def test_part_of_sparse_batches_keeps_their_features():
    spec = (tf.SparseTensorSpec((None, 4)), tf.TensorSpec((None, 3)))
    features, _ = splitting.part_spec(spec, 2)
    # Keras builds layers by it, without a batch.
    assert features.shape.as_list() == [None, 4]

    def generate():
        yield tf.sparse.from_dense([[1.0, 0, 0, 2], [0, 3, 0, 0]]), tf.ones([2, 3])

    dealt = splitting.deal(tf.data.Dataset.from_generator(generate, output_signature=spec), range(2), 2)
    assert dealt.element_spec[0].shape.as_list() == [None, 4]
    rows = [tf.sparse.to_dense(part).numpy().tolist() for part, _ in dealt]
    assert rows == [[[1, 0, 0, 2]], [[0, 3, 0, 0]]]


def test_parts_come_with_the_size_of_their_batch_if_asked():
    dealt = splitting.deal(tf.data.Dataset.range(7).batch(5), range(2), 2, with_totals=True)
    assert [(part.tolist(), int(total)) for part, total in dealt.as_numpy_iterator()] == [
        ([0, 1], 5),
        ([2, 3, 4], 5),
        ([5], 2),
        ([6], 2),
    ]
