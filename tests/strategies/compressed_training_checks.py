# SPDX-License-Identifier: Apache-2.0
"""`Compression` under `ParameterServerStrategy`: what is sent, what is kept, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from compressed_cluster import X, compiled, fit
from waiting import wait_until

import tfdist
from tfdist.compat.tensorflow import servers
from tfdist.compression import HalfPrecision, SignSGD, TopK, frames, on_servers
from tfdist.engines.transfer import encoding

SEND_ALL = TopK(1.0, momentum=0)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(cluster: Any) -> Iterator[None]:
    """In place of the fixture for all tests: a worker that is started again belongs to the cluster."""
    yield


def embedded() -> keras.Model:
    rows = keras.layers.Embedding(50, 3)
    return keras.Sequential([keras.Input((8,)), rows, keras.layers.Flatten(), keras.layers.Dense(1)])


def loss_scale() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)


# Where gradients come from is that of uncompressed ones: `TestAggregated` of `tests/conformance` has more of them.
def test_codec_that_sends_all_equals_uncompressed(with_policies: Callable[..., Any]) -> None:
    given, weights = (embedded, lambda: keras.optimizers.Adam(0.01)), []
    x = np.abs(X * 10).astype(np.int64).clip(0, 49)
    for more in ([], [tfdist.Compression(SEND_ALL)]):
        model = compiled(with_policies(tfdist.BackupWorkers(spares=0), *more), *given)
        fit(model, x=x)
        weights.append(model.get_weights())
    alone = compiled(tf.distribute.get_strategy(), *given)
    fit(alone, x=x)
    for uncompressed, compressed, expected in zip(*weights, alone.get_weights(), strict=True):
        # Rows of two workers are added in the order of their arrival.
        np.testing.assert_allclose(compressed, uncompressed, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(compressed, expected, rtol=1e-4, atol=1e-5)


# `test_on_servers.py` has the other codecs.
LOSSY = {
    "SignSGD": [tfdist.Warmup(steps=2), tfdist.SoftSync(2), tfdist.StalenessScaling(), tfdist.Compression(SignSGD())],
    "bfloat16": [tfdist.BackupWorkers(spares=1), tfdist.Compression(HalfPrecision("bfloat16"))],
}


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codec_trains_and_reports_bytes(with_policies: Callable[..., Any], name: str) -> None:
    strategy = with_policies(*LOSSY[name])
    model = compiled(strategy, optimizer=lambda: keras.optimizers.SGD(0.05))
    history = fit(model, epochs=8)
    assert history[-1] < 0.5 * history[0]
    report = strategy.report()
    pushed = sum(report.accepted.values()) + sum(report.dropped.values())
    assert sum(report.message_bytes.values()) > 0
    if name == "bfloat16":
        # A gradient is 2 bytes per parameter. To each of two parameter servers a message has a frame and the name of
        # its sender; counts, logs and weights of a contribution are some bytes.
        each = sum(report.message_bytes.values()) / pushed
        assert each <= 2 * model.count_params() + 2 * (frames.HEADER_BYTES + len("worker:0")) + 100
        assert sum(report.message_bytes.values()) >= 2 * model.count_params() * sum(report.accepted.values())
    assert "gradients sent encoded" in report.transfer


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: tfdist.Compression(HalfPrecision("bfloat16")), marks=pytest.mark.slow),
        lambda: tfdist.Compression(SignSGD(), variables="bfloat16"),
    ],
    ids=["of the codec", "on request"],
)
def test_variables_are_rounded_for_workers(make: Callable[[], Any], with_policies: Callable[..., Any]) -> None:
    class Shows(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            seen = tf.reduce_max(tf.convert_to_tensor(self.dense.kernel))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss, "seen": seen}

    def made() -> keras.Model:
        model = Shows()
        model(X[:1])
        return model

    strategy = with_policies(make())
    model = compiled(strategy, made, optimizer=lambda: keras.optimizers.SGD(0.0))
    model.dense.kernel.assign(np.full((8, 1), 1.001, np.float32))
    seen = model.fit(X, X[:, :1], batch_size=32, verbose=0).history["seen"][-1]
    assert seen == 1.0
    assert model.get_weights()[0][0, 0] == np.float32(1.001)


@pytest.mark.parametrize(
    "codec",
    [SignSGD(), pytest.param(HalfPrecision("bfloat16"), marks=pytest.mark.slow)],
    ids=["SignSGD", "HalfPrecision"],
)
def test_damaged_message_raises_and_names_sender(
    codec: Any, with_policies: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call_function = servers.call_function

    def damaging(inputs: list[tf.Tensor], dtypes: list[tf.DType]) -> list[tf.Tensor]:
        if [*dtypes[:2]] != [tf.uint8] * 2:
            return call_function(inputs, dtypes)
        frame, sender, *state = call_function(inputs, dtypes)
        flip = tf.cast(tf.reduce_all(sender == list(b"worker:1")), tf.uint8)
        return [tf.concat([frame[:-1], tf.bitwise.bitwise_xor(frame[-1:], flip)], 0), sender, *state]

    monkeypatch.setattr(encoding.servers, "call_function", damaging)
    model = compiled(with_policies(tfdist.BackupWorkers(spares=0), tfdist.Compression(codec)))
    with pytest.raises(Exception, match=r"the message of worker:1 can't be decoded: it was damaged on the way"):
        fit(model)


def test_gradient_not_finite_keeps_states(with_policies: Callable[..., Any]) -> None:
    strategy = with_policies(tfdist.BackupWorkers(spares=0), tfdist.Compression(SignSGD()))
    model = compiled(strategy, optimizer=loss_scale)
    fit(model)
    weights, (_, before) = model.get_weights(), strategy.distribution.saved_state.collect_state(model)
    fit(model, epochs=1, x=np.full_like(X, np.nan))
    _, after = strategy.distribution.saved_state.collect_state(model)
    for found, expected in zip([*model.get_weights(), *after], [*weights, *before], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_state_of_a_model_that_is_gone_is_freed_on_workers(with_policies: Callable[..., Any]) -> None:
    feedback = with_policies(tfdist.Compression(SignSGD())).distribution.saved_state._of_workers["Compression"]
    memory = feedback.memory

    def trained() -> list[str]:
        model = compiled(memory._strategy)
        fit(model)
        states = feedback.states_of(model)
        assert states
        return [name for state in states for name in memory._names(state)]

    def are_there(names: list[str]) -> list[bool]:
        made = [memory._handle(name, tf.TensorSpec(None)) for name in names]
        return [bool(tf.raw_ops.VarIsInitializedOp(resource=handle)) for handle in made]

    def is_anywhere(names: list[str]) -> bool:
        return any(any(memory._on_worker(worker, lambda: are_there(names))) for worker in range(2))

    def is_freed(names: list[str]) -> bool:
        # An engine may hold the step that it made last.
        trained()
        gc.collect()
        return not is_anywhere(names)

    old = trained()
    assert is_anywhere(old)
    wait_until(lambda: is_freed(old), 100)
    assert is_anywhere(trained())


@pytest.mark.slow
def test_process_without_codecs_raises_an_error(cluster: Any) -> None:
    with tf.device("/job:chief/replica:0/task:0/device:CPU:0"), pytest.raises(tf.errors.InvalidArgumentError):
        servers.call_function([tf.constant(on_servers.request("probe"))], [tf.uint8])


@pytest.mark.slow
def test_killed_worker_is_replaced_with_an_empty_state(with_policies: Callable[..., Any]) -> None:
    strategy = with_policies(tfdist.Compression(SignSGD()))
    model = compiled(strategy)
    losses = fit(model)
    tfdist.testing.kill(strategy, "worker:1")
    losses += fit(model, epochs=8)
    assert losses[-1] < losses[0]
    before = strategy.report().message_bytes["worker:1"]
    description, arrays = strategy.distribution.saved_state.collect_state(model)
    assert len(arrays) == 2 * len(model.get_weights())
    assert any(np.any(each) for each in arrays[: len(arrays) // 2])
    strategy.distribution.saved_state.distribute_state(model, description, arrays)
    while strategy.report().message_bytes["worker:1"] == before:
        fit(model)
