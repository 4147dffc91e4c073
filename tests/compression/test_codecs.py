# SPDX-License-Identifier: Apache-2.0
"""Each codec keeps the promises of `tfdist.compression.Codec`; the formulas of HalfPrecision and SignSGD."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import simulated
import tensorflow as tf

from tfdist.compression import Codec, HalfPrecision, LocalTransport, PowerSGD, SignSGD, Threshold, TopK, frames
from tfdist.compression.gathered import GatheredCodec

pytestmark = pytest.mark.devices

CODECS: tuple[Codec, ...] = (
    HalfPrecision("float16"),
    Threshold(0.5, clip_every=None),
    Threshold(clip_every=None),
    TopK(0.01),
    TopK(1.0, momentum=0),
    TopK(0.02, warmup=3, momentum=0.5, values="float16"),
    SignSGD(),
    PowerSGD(8, min_compression=1.0),
    PowerSGD(2, bits=4),
)
GATHERED = [codec for codec in CODECS if isinstance(codec, GatheredCodec)]
SHAPES = ((7, 5), (), (3, 0, 2), (300, 40), (2, 3, 4, 5), (257,))
# More than ten: the order of names is not that of numbers.
MANY_SHAPES = (*SHAPES, (1,), (0,), (3,), (2, 2), (9,))
# A gradient moves a velocity, and is sent more than once in the long run.
WITHOUT_MOMENTUM = [codec for codec in CODECS if not getattr(codec, "momentum", 0)]
each_codec, each_gathered_codec, each_without_momentum = (
    pytest.mark.parametrize("codec", codecs, ids=repr) for codecs in (CODECS, GATHERED, WITHOUT_MOMENTUM)
)


def gradients(
    seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtypes: Sequence[str] = ("float32",)
) -> list[tf.Tensor]:
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    return [tf.constant(array, dtypes[index % len(dtypes)]) for index, array in enumerate(arrays)]


def specs_of(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def flat(tensors: Sequence[tf.Tensor]) -> np.ndarray:
    return np.concatenate([np.asarray(tf.cast(tensor, tf.float64)).reshape(-1) for tensor in tensors])


def residual(state: dict[str, tf.Tensor], tensors: Sequence[tf.Tensor]) -> np.ndarray:
    """Values that are kept of each tensor; 0 of a tensor that is sent as it is."""
    return flat([state.get(f"residual/{index}", tf.zeros(tensor.shape)) for index, tensor in enumerate(tensors)])


def tolerance(codec: Codec) -> float:
    return 1e-3 if isinstance(codec, HalfPrecision) else 1e-6


def assert_equal_states(one: dict[str, tf.Tensor], other: dict[str, tf.Tensor]) -> None:
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@each_without_momentum
def test_sent_plus_kept_equals_what_came_in(codec: Codec):
    state = codec.init(specs_of(gradients(0)))
    sent, came = 0.0, 0.0
    for step in range(6):
        tensors = gradients(step)
        sums, state = codec.exchange(tensors, state, LocalTransport())
        sent, came = sent + flat(sums), came + flat(tensors)
        np.testing.assert_allclose(sent + residual(state, tensors), came, rtol=1e-5, atol=20 * tolerance(codec))


@each_without_momentum
def test_the_sum_over_workers_is_equal_on_all(codec: Codec):
    num_workers = 3
    states = [codec.init(specs_of(gradients(0)))] * num_workers
    sent, came = 0.0, 0.0
    for step in range(3):
        tensors = [gradients(10 * step + worker) for worker in range(num_workers)]
        sums, states, _ = simulated.exchange(codec, tensors, states)
        for other in sums[1:]:
            np.testing.assert_array_equal(flat(sums[0]), flat(other))
        sent, came = sent + flat(sums[0]), came + sum(map(flat, tensors))
        kept = sum(residual(state, tensors[0]) for state in states)
        np.testing.assert_allclose(sent + kept, came, rtol=1e-5, atol=100 * tolerance(codec))


@each_codec
def test_shapes_and_dtypes_are_kept(codec: Codec):
    tensors = gradients(1, dtypes=("float16", "float32", "bfloat16", "float64"))
    state = codec.init(specs_of(tensors))
    assert all(value.dtype in (tf.float32, tf.int64) for value in state.values())
    sums, new = codec.exchange(tensors, state, LocalTransport())
    assert specs_of(sums) == specs_of(tensors)
    assert {name: value.shape for name, value in new.items()} == {name: value.shape for name, value in state.items()}


@each_codec
def test_zeros_stay_zeros(codec: Codec):
    tensors = [tf.zeros(shape) for shape in SHAPES]
    state = codec.init(specs_of(tensors))
    for _ in range(3):
        sums, state = codec.exchange(tensors, state, LocalTransport())
        np.testing.assert_array_equal(flat(sums), 0)
        np.testing.assert_array_equal(residual(state, tensors), 0)


@each_codec
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_reach_all_workers_and_no_state(codec: Codec, value: float):
    states = [codec.init(specs_of(gradients(0)))] * 2
    _, states, _ = simulated.exchange(codec, [gradients(1), gradients(2)], states)
    bad = gradients(3)
    bad[3] = tf.tensor_scatter_nd_update(bad[3], [[250, 17]], [value])
    sums, new, _ = simulated.exchange(codec, [bad, gradients(4)], states)
    for worker in range(2):
        assert not np.isfinite(flat(sums[worker])).all()
        assert_equal_states(new[worker], states[worker])


@each_gathered_codec
def test_a_gathered_nan_is_in_each_tensor(codec: Codec):
    bad = [tf.constant([1.0, np.nan]), tf.constant(2.0), tf.zeros([2, 0])]
    sums, _ = codec.exchange(bad, codec.init(specs_of(bad)), LocalTransport())
    assert np.isnan(sums[0]).all() and np.isnan(sums[1]) and sums[2].shape == (2, 0)


@each_codec
@pytest.mark.parametrize("shapes", [(), ((0,),), ((), (1,), (0, 4))], ids=str)
def test_empty_steps_are_legal(codec: Codec, shapes: tuple[tuple[int, ...], ...]):
    tensors = gradients(0, shapes)
    sums, _ = codec.exchange(tensors, codec.init(specs_of(tensors)), LocalTransport())
    assert specs_of(sums) == specs_of(tensors)


@each_without_momentum
def test_denormals_are_kept_or_sent(codec: Codec):
    tensors = [tf.constant([1e-42, -1e-40, 1.0, 0.0])]
    sums, state = codec.exchange(tensors, codec.init(specs_of(tensors)), LocalTransport())
    np.testing.assert_allclose(flat(sums) + residual(state, tensors), flat(tensors), rtol=1e-5, atol=1e-37)


@each_gathered_codec
def test_constants_of_a_graph_are_not_written_to(codec: Codec):
    """Encoding into the memory of its inputs would change the constants, and the second step would differ."""
    tensors = gradients(0)
    before = codec.init(specs_of(tensors))
    _, before = codec.exchange(tensors, before, LocalTransport())
    arrays = {name: value.numpy() for name, value in before.items()}

    @tf.function
    def step() -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        constants = [tf.constant(tensor.numpy()) for tensor in tensors]
        state = {name: tf.constant(array) for name, array in arrays.items()}
        return codec.exchange(constants, state, LocalTransport())

    first_sums, first_state = step()
    second_sums, second_state = step()
    np.testing.assert_array_equal(flat(first_sums), flat(second_sums))
    assert_equal_states(first_state, second_state)


@each_codec
def test_graphs_with_state_in_variables_equal_eager_calls(codec: Codec):
    """As engines do: the state is read from variables and assigned to them in the step."""
    specs = specs_of(gradients(0, MANY_SHAPES))
    expected = codec.init(specs)
    variables = {name: tf.Variable(value) for name, value in expected.items()}
    before = {name: value.numpy().copy() for name, value in variables.items()}

    @tf.function
    def step(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        state = {name: variable.read_value() for name, variable in variables.items()}
        sums, state = codec.exchange(tensors, state, LocalTransport())
        assert [total.shape for total in sums] == [spec.shape for spec in specs]
        for name, variable in variables.items():
            variable.assign(state[name])
        return sums

    for seed in range(3):
        sums, expected = codec.exchange(gradients(seed, MANY_SHAPES), expected, LocalTransport())
        np.testing.assert_array_equal(flat(step(gradients(seed, MANY_SHAPES))), flat(sums))
    assert_equal_states(expected, {name: variable.value() for name, variable in variables.items()})
    for name, value in codec.init(specs).items():
        np.testing.assert_array_equal(value, before[name])


@each_codec
def test_a_saved_state_goes_on_bit_for_bit(codec: Codec):
    state = codec.init(specs_of(gradients(0)))
    _, state = codec.exchange(gradients(0), state, LocalTransport())
    saved = pickle.loads(pickle.dumps({name: value.numpy() for name, value in state.items()}))
    restored = {name: tf.constant(value) for name, value in saved.items()}
    sums, new = codec.exchange(gradients(1), state, LocalTransport())
    again, new_again = codec.exchange(gradients(1), restored, LocalTransport())
    np.testing.assert_array_equal(flat(sums), flat(again))
    assert_equal_states(new, new_again)


@each_codec
def test_the_state_of_other_tensors_is_refused(codec: Codec):
    state = codec.init(specs_of(gradients(0)))
    if not state:
        pytest.skip("keeps no state")
    with pytest.raises(ValueError, match="call init again"):
        codec.exchange(gradients(0)[1:], state, LocalTransport())


@each_codec
def test_integer_and_sparse_gradients_are_refused(codec: Codec):
    with pytest.raises(ValueError, match=r"floating-point gradients only. Received: gradient 1 \(ids\) of dtype int32"):
        codec.init([tf.TensorSpec([2], tf.float32), tf.TensorSpec([3], tf.int32, "ids")])
    with pytest.raises(ValueError, match="static shape"):
        codec.init([tf.TensorSpec([None], tf.float32)])
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]), tf.constant([9, 2]))
    with pytest.raises(TypeError, match=r"sparse one.*IndexedSlices as gradient 0"):
        codec.exchange([slices], {}, LocalTransport())


@each_codec
def test_codecs_are_frozen_values(codec: Codec):
    assert eval(repr(codec)) == codec
    assert hash(codec) == hash(dataclasses.replace(codec))
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.unknown = 1
    assert sum(codec == other for other in CODECS) == 1
    assert isinstance(codec.commutes_with_sum, bool)


@each_gathered_codec
def test_damaged_messages_name_their_sender(codec: GatheredCodec):
    tensors = gradients(0)
    specs = specs_of(tensors)
    good = codec.encode(tensors, codec.init(specs))[0].numpy()
    for damage in ("flip", "cut", "rubbish"):
        bad = {"flip": good.copy(), "cut": good[: good.size // 2].copy(), "rubbish": np.full(99, 7, np.uint8)}[damage]
        bad[-1] ^= 4
        rows = simulated.stacked([good, bad, good]) if damage != "cut" else bad[None]
        senders = ["worker:0", "worker:1", "worker:2"] if damage != "cut" else ["worker:1"]
        with pytest.raises(ValueError, match="the message of worker:1 can't be decoded: it"):
            codec.decode(tf.constant(rows), specs, senders)
        with pytest.raises(tf.errors.InvalidArgumentError, match="the message of worker:1 can't be decoded: it"):
            tf.function(lambda rows, senders=senders: codec.decode(rows, specs, senders))(tf.constant(rows))


@pytest.mark.parametrize(
    ("codec", "arguments", "text"),
    [
        (Threshold, {"tau": 0}, 'or "adaptive". Received: tau=0'),
        (Threshold, {"tau": -1.5}, "Received: tau=-1.5"),
        (Threshold, {"tau": float("nan")}, "Received: tau=nan"),
        (Threshold, {"tau": 1e-50}, "range of float32"),
        (Threshold, {"tau": "auto"}, "Received: tau='auto'"),
        (Threshold, {"tau": True}, "Received: tau=True"),
        (Threshold, {"min_density": 0}, "density in (0, 1]"),
        (Threshold, {"max_density": 1.5}, "Received: max_density=1.5"),
        (Threshold, {"min_density": 0.1}, "must not exceed max_density"),
        (Threshold, {"clip_every": 0}, "positive number of steps, or None. Received: clip_every=0"),
        (TopK, {"density": 0}, "TopK(density=...) must be a density in (0, 1], such as 0.001. Received: density=0"),
        (TopK, {"density": 1.01}, "Received: density=1.01"),
        (TopK, {"density": "auto"}, "Received: density='auto'"),
        (TopK, {"density": float("nan")}, "Received: density=nan"),
        (TopK, {"density": 0.1, "warmup": -1}, "number of steps, or 0. Received: warmup=-1"),
        (TopK, {"density": 0.1, "warmup": 1.5}, "Received: warmup=1.5"),
        (TopK, {"density": 0.1, "momentum": 1.0}, "in [0, 1). Received: momentum=1.0"),
        (TopK, {"density": 0.1, "values": "int8"}, "Received: values='int8'"),
        *(
            (PowerSGD, {"rank": rank}, "PowerSGD(rank=...) must be an integer of at least 1. Received: rank=")
            for rank in (0, -1, 1.5, True, "2", None)
        ),
        (PowerSGD, {"rank": 2, "min_compression": 0.5}, "must be at least 1"),
        (PowerSGD, {"rank": 2, "bits": 8}, "must be 4 or 32"),
        *(
            (HalfPrecision, {"dtype": dtype}, 'must be "float16" or "bfloat16". Received: dtype=')
            for dtype in ("float32", "half", 16, None, "")
        ),
    ],
)
def test_bad_arguments_are_refused(codec: type[Codec], arguments: dict[str, object], text: str):
    with pytest.raises(ValueError) as raised:
        codec(**arguments)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bytes_are_halved_exactly(dtype: str):
    tensors = [tf.ones([3, 7]), tf.ones([]), tf.ones([100])]
    message, state = HalfPrecision(dtype).encode(tensors, {})
    assert message.dtype == dtype and state == {}
    assert 2 * message.numpy().nbytes == sum(tensor.numpy().nbytes for tensor in tensors)


def test_values_are_rounded_to_the_nearest():
    values = tf.constant([1.0, 1.0 + 2**-12, -0.1, 6e-8])
    (total,), _ = HalfPrecision("float16").exchange([values], {}, LocalTransport())
    np.testing.assert_array_equal(total, values.numpy().astype(np.float16).astype(np.float32))


def test_overflow_is_infinite_in_float16_only():
    values = [tf.constant([1e5, 1.0])]
    assert np.isinf(HalfPrecision("float16").exchange(values, {}, LocalTransport())[0][0][0])
    assert np.isfinite(HalfPrecision("bfloat16").exchange(values, {}, LocalTransport())[0][0]).all()


def test_steps_follow_the_published_formula():
    rng = np.random.default_rng(0)
    codec, spec, error = SignSGD(), tf.TensorSpec([70_003], tf.float32), np.zeros(70_003, np.float32)
    state = codec.init([spec])
    for _ in range(4):
        gradient = rng.standard_normal(70_003).astype(np.float32)
        p = gradient + error
        delta = np.abs(p).mean(dtype=np.float64).astype(np.float32) * np.sign(p)
        error = p - delta
        (total,), state = codec.exchange([tf.constant(gradient)], state, LocalTransport())
        np.testing.assert_allclose(total, delta, rtol=1e-6)
        np.testing.assert_allclose(state["residual/0"], error, rtol=1e-4, atol=1e-5)


def test_messages_take_one_bit_per_value_and_a_scale_per_tensor():
    tensors = [tf.ones([1000, 8]), tf.ones([3]), tf.ones([]), tf.ones([0])]
    codec = SignSGD()
    message, _ = codec.encode(tensors, codec.init([tf.TensorSpec(tensor.shape) for tensor in tensors]))
    assert message.shape[0] == frames.HEADER_BYTES + 4 * 4 + 1000 + 1 + 1


def test_zeros_are_sent_as_positive_values():
    tensors = [tf.constant([0.0, -3.0])]
    (total,), state = SignSGD().exchange(tensors, SignSGD().init([tf.TensorSpec([2])]), LocalTransport())
    np.testing.assert_array_equal(total, [1.5, -1.5])
    np.testing.assert_array_equal(state["residual/0"], [-1.5, -1.5])
