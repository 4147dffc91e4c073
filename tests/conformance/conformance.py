# SPDX-License-Identifier: Apache-2.0
"""Checks that a strategy must pass under each policy that lets all replicas count: a class to be derived from."""

from __future__ import annotations

import functools
import os
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import own_models
import prefork
import pytest
import tensorflow as tf
from cases import CASES, TRANSPORT
from overlapping import during_fit
from training import OPTIMIZERS, SETTINGS, OwnStep, X, Y, assert_close, assert_like_one_device, dense_model, trained

Marks: TypeAlias = list[pytest.MarkDecorator]


@functools.cache
def on_one_device(name: str) -> Any:
    """The numbers of a case, which all strategies are compared with. One process of a run of pytest finds them for all.

    Where examples are batched in another way, each process finds them by itself.
    """
    path = pathlib.Path(os.environ[prefork.VARIABLE], f"one device, {name.replace('/', ' ')}.pickle")
    if not SETTINGS.in_one_batch and path.exists():
        return pickle.loads(path.read_bytes())
    with tempfile.TemporaryDirectory() as directory:
        found = CASES[name](tf.distribute.get_strategy(), pathlib.Path(directory))
    if not SETTINGS.in_one_batch:
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(found))
        part.replace(path)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a class derived from `Numbers` its cases; for modules to import."""
    if "case" in metafunc.fixturenames:
        cases = metafunc.cls.cases().items()
        metafunc.parametrize("case", [pytest.param(case, marks=marks, id=case) for case, marks in cases])


class Numbers:
    """The comparison of a strategy, that a subclass gives as the fixture `strategy`, with one device.

    Attributes:
      only: names of cases, if the strategy promises no others.
      left_out: names of cases that the strategy does not promise.
      quick: names of the cases of `make test`; by default all.
      quick_tests: names of the tests beside them that are in `make test`; by default all. `tests/conftest.py` marks
        the others.
      repeats: whether another suite's steps run in the same way, so that `make test-all` has only those of TRANSPORT,
        and `make test-conformance` the others.
    """

    only: frozenset[str] | None = None
    left_out: frozenset[str] = frozenset()
    quick: frozenset[str] | None = None
    quick_tests: frozenset[str] | None = None
    repeats = False

    @classmethod
    def cases(cls) -> dict[str, Marks]:
        """Returns the cases that the strategy must pass, with their marks."""
        promised = (CASES.keys() if cls.only is None else cls.only) - cls.left_out
        quick = promised if cls.quick is None else cls.quick
        unknown = (promised | cls.left_out | quick) - CASES.keys()
        assert not unknown, unknown
        return {case: cls._marks(case, quick) for case in CASES if case in promised}

    @classmethod
    def other_tests(cls) -> dict[str, Marks]:
        """Returns the names of the tests beside the cases, with their marks."""
        tests = {name for name in dir(cls) if name.startswith("test_") and getattr(cls, name) and name != _OF_NUMBERS}
        quick = tests if cls.quick_tests is None else cls.quick_tests
        assert quick <= tests, quick - tests
        return {name: cls._marks(name, quick) for name in sorted(tests)}

    @classmethod
    def _marks(cls, name: str, quick: Collection[str]) -> Marks:
        if name in quick:
            return []
        return [pytest.mark.repeated if cls.repeats and name not in TRANSPORT else pytest.mark.slow]

    @classmethod
    def checks(cls) -> list[tuple[str, Marks]]:
        """Names of the tests, with their marks; each case has one."""
        cases = {f"{_OF_NUMBERS}[{case}]": marks for case, marks in cls.cases().items()}
        return [*(cls.other_tests() | cases).items()]

    def expected(self, case: str, found: Any, directory: pathlib.Path) -> Any:
        """The numbers of one device; those of several processes that find the same are compared here."""
        del found, directory
        return on_one_device(case)

    def test_numbers_are_those_of_one_device(self, strategy: Any, case: str, tmp_path: pathlib.Path) -> None:
        found = CASES[case](strategy, tmp_path)
        assert_close(self.expected(case, found, tmp_path), found)


_OF_NUMBERS = Numbers.test_numbers_are_those_of_one_device.__name__


class Conformance(Numbers):
    """The same, and counts, callbacks, resumption and errors.

    Attributes:
      is_exclusive: whether only one model at a time is trained, in one thread.
      logs_within: the relative error of logs that a step of its own computes from the weights.
    """

    is_exclusive = True
    logs_within = 0.05

    def test_own_train_step_keeps_its_logs(self, strategy: Any) -> None:
        one, many = (
            trained(each, lambda: OPTIMIZERS.SGD(0.1), model=OwnStep, metrics=None)
            for each in (tf.distribute.get_strategy(), strategy)
        )
        assert_close(one[0], many[0])
        assert many[2][-1].keys() == {"own", "constant"}
        assert many[2][-1]["constant"] == pytest.approx(2.5)
        assert many[2][-1]["own"] == pytest.approx(one[2][-1]["own"], rel=self.logs_within)

    # Counts.

    def test_evaluate_and_predict_see_every_example_once(self, strategy: Any) -> None:
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
            model.compile(loss="mse", metrics=["mae"])
        x = np.arange(21, dtype=np.float32)[:, None]
        np.testing.assert_array_equal(model.predict(x, batch_size=8, verbose=0), 2 * x)
        assert model.evaluate(x, 0 * x, batch_size=8, verbose=0)[1] == pytest.approx(2 * x.mean())

    def test_every_batch_of_a_generator_is_used_once(self, strategy: Any) -> None:
        with strategy.scope():
            model = Counting()
            model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        history = model.fit(numbers(12), validation_data=numbers(7), verbose=0).history
        assert history == {"seen": [sum(range(48))], "val_seen": [sum(range(28))]}
        some = model.fit(numbers(12), steps_per_epoch=5, epochs=2, verbose=0).history["seen"]
        assert some == [sum(range(20)), sum(range(20, 40))]
        assert model.evaluate(numbers(9), verbose=0, return_dict=True) == {"seen": sum(range(36))}

    def test_replicas_without_examples_leave_no_trace(self, strategy: Any) -> None:
        x, y, batch_size = X[:9], Y[:9], 1
        with strategy.scope():
            recurrent = [keras.layers.Reshape((4, 1)), keras.layers.LSTM(2)]
            layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), *recurrent, keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((3,)), *layers])
            model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0).history
        # Of known sizes.
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(1, drop_remainder=True), verbose=0)
        assert np.isfinite([*history["loss"], *history["mae"]]).all()
        for variable in model.variables:
            copies = [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]
            assert np.isfinite(copies).all(), variable.path
        assert model.predict(x, batch_size=batch_size, verbose=0).shape == (9, 1)

    def test_evaluate_after_an_own_step_counts_no_empty_replica(self, strategy: Any) -> None:
        with strategy.scope():
            model = PenalizedOwn()
            model.build()
            model.compile("sgd", "mse")
        found = model.evaluate(X[:9], Y[:9], batch_size=8, verbose=0, return_dict=True)["loss"]
        penalties = [0.1 * np.mean(np.square(model.first(X[rows]))) for rows in (slice(8), slice(8, 9))]
        expected = np.mean((model.predict(X[:9], verbose=0) - Y[:9]) ** 2) + np.dot(penalties, [8 / 9, 1 / 9])
        assert found == pytest.approx(expected, rel=1e-5)

    def test_steps_on_single_batches(self, strategy: Any) -> None:
        with strategy.scope():
            model = dense_model()
            model.compile(OPTIMIZERS.Adam(0.01), "mse", metrics=["mae"])
        before = model.test_on_batch(X, Y, return_dict=True)
        assert before == pytest.approx(model.evaluate(X, Y, verbose=0, return_dict=True), abs=1e-6)
        losses = [model.train_on_batch(X[:7], Y[:7])[0] for _ in range(20)]
        assert losses[-1] < losses[0]
        assert int(model.optimizer.iterations.numpy()) == 20
        np.testing.assert_allclose(model.predict_on_batch(X), model.predict(X, verbose=0), atol=1e-6)

    def test_predictions_of_single_batch_may_have_more_rows(self, strategy: Any) -> None:
        with strategy.scope():
            model = TwoRowsEach([keras.Input((3,)), keras.layers.Dense(1)])
        x = np.arange(9, dtype=np.float32).reshape(3, 3)
        np.testing.assert_allclose(model.predict_on_batch(x), model.predict(x, verbose=0), rtol=1e-6)

    def test_model_compiled_again_trains_as_compiled_last(self, strategy: Any) -> None:
        with strategy.scope():
            model = dense_model()
            model.compile(OPTIMIZERS.SGD(0.0), "mse")
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
        before = model.get_weights()
        with strategy.scope():
            model.compile(OPTIMIZERS.SGD(0.1), "mae", metrics=["mse"])
        history = model.fit(X, Y, batch_size=8, epochs=1, verbose=0).history
        assert set(history) == {"loss", "mse"}
        assert int(model.optimizer.iterations.numpy()) == 6
        assert any(np.abs(old - new).max() > 1e-4 for old, new in zip(before, model.get_weights(), strict=True))

    def test_metric_variable_of_aggregation_mean_is_read(self, strategy: Any) -> None:
        with strategy.scope():
            metric = keras.metrics.Metric(name="largest")
            largest = metric.add_variable((), "ones", name="largest", aggregation="mean")
        assert float(tf.convert_to_tensor(largest.value)) == 1.0

    # Callbacks, and going on.

    def test_callbacks_stop_schedule_save_and_restore(self, strategy: Any, tmp_path: pathlib.Path) -> None:
        callbacks = keras.callbacks
        with strategy.scope():
            model = dense_model()
            model.compile(OPTIMIZERS.Adam(0.01), "mse")
        rates: list[float] = []
        history = model.fit(
            *(X, Y),
            batch_size=8,
            epochs=5,
            verbose=0,
            validation_data=(X, Y),
            callbacks=[
                callbacks.EarlyStopping("val_loss", patience=0, min_delta=100),
                callbacks.LearningRateScheduler(lambda epoch: rates.append(0.5**epoch) or 0.5**epoch),
                callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
                callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
                callbacks.CSVLogger(tmp_path / "log.csv"),
                callbacks.TensorBoard(tmp_path / "board"),
            ],
        ).history
        assert len(history["loss"]) == len(rates) == 2
        assert float(model.optimizer.learning_rate.numpy()) == 0.5
        with strategy.scope():
            loaded = keras.saving.load_model(tmp_path / "2.keras")
        tf.nest.map_structure(np.testing.assert_array_equal, loaded.get_weights(), model.get_weights())
        assert int(loaded.optimizer.iterations.numpy()) == 12
        restored = callbacks.BackupAndRestore(tmp_path / "backup")
        rest = loaded.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[restored])
        assert len(rest.history["loss"]) == 1
        assert int(loaded.optimizer.iterations.numpy()) == 18
        assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
        assert sorted(path.name for path in (tmp_path / "board").iterdir()) == ["train", "validation"]

    # Calls that overlap.

    def test_second_thread_is_refused_during_a_fit(self, strategy: Any) -> None:
        model, other = small(strategy), small(strategy)
        refused = [fitting(model), fitting(other), predicting(model)] if self.is_exclusive else [fitting(model)]
        for call in refused:
            error = during_fit(fitting(model), call).error
            assert "overlaps with another thread's call" in error
            assert "\n" not in error
        assert (int(model.optimizer.iterations), int(other.optimizer.iterations)) == (6 * len(refused), 0)

    def test_calls_within_callbacks_work(self, strategy: Any) -> None:
        model, other = small(strategy), small(strategy)
        evaluating = functools.partial(other.evaluate, X, Y, batch_size=8, verbose=0)
        for call in (predicting(model), evaluating, fitting(other)):
            meanwhile = during_fit(fitting(model), call, in_thread=False)
            assert not meanwhile.error
            assert meanwhile.result is not None
        assert (int(model.optimizer.iterations), int(other.optimizer.iterations)) == (18, 6)

    # Errors.

    @pytest.mark.parametrize(("method", "kind"), [("call", Exception), ("train_step", LookupError)])
    def test_exception_in_the_step_keeps_its_type(self, strategy: Any, method: str, kind: type[Exception]) -> None:
        def failing(model: Any, given: Any) -> None:
            raise LookupError("my own words")

        failing.__name__ = method
        with strategy.scope():
            model = type("Failing", (OwnStep,), {method: failing})()
            if method == "train_step":
                model.build((None, 3))
            model.compile("sgd", "mse")
        with pytest.raises(kind, match="my own words"):
            model.fit(X, Y, verbose=0)

    def test_error_of_an_operation_is_raised_and_the_next_fit_is_clean(self, strategy: Any) -> None:
        class Failing(OwnStep):
            def call(self, x):
                with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_sum(x), -1.0, "my own words")]):
                    return self.dense(x)

        with strategy.scope():
            model = Failing()
            model.dense.build((None, 3))
            model.built = True
            model.compile("sgd", "mse")
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="my own words"):
            model.fit(X, Y, batch_size=8, verbose=0)
        assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.1))

    def test_error_of_the_data_is_raised(self, strategy: Any) -> None:
        def batches() -> Iterator[Any]:
            yield X[:8], Y[:8]
            raise LookupError("my own words")

        spec = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
        with strategy.scope():
            model = dense_model()
            model.compile("sgd", "mse")
        with pytest.raises(Exception, match="my own words"):
            model.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), verbose=0)
        assert int(model.optimizer.iterations.numpy()) <= 1

    @pytest.mark.parametrize("size", [8, None], ids=["known sizes", "unknown sizes"])
    def test_batch_of_several_first_dimensions_is_refused(self, strategy: Any, size: int | None) -> None:
        scales = np.ones(3, np.float32)
        data = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(8, drop_remainder=size is not None)
        with strategy.scope():
            model = Scaled()
            model.compile("sgd", "mse")
        before = model.get_weights()
        message = r"^dataset: .*different (batch sizes|numbers of examples).*Received"
        with pytest.raises(ValueError, match=message) as raised:
            model.fit(data.map(lambda x, y: ((scales, x), y)), verbose=0)
        assert "\n" not in str(raised.value)
        tf.nest.map_structure(np.testing.assert_array_equal, model.get_weights(), before)

    @pytest.mark.parametrize("call", ["fit", "predict"])
    def test_batch_of_another_size_than_a_stateful_layer_is_refused(self, strategy: Any, call: str) -> None:
        with strategy.scope():
            inputs = keras.Input(batch_shape=(5, 4, 2))
            model = keras.Sequential([inputs, keras.layers.SimpleRNN(1, stateful=True)])
            model.compile("sgd", "mse")
        x = np.ones((48, 4, 2), np.float32)
        data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1]) if call == "fit" else x).batch(8)
        message = rf"^model\.{call}: .* was built for batches of 5, but .* gives each replica \d of the 8 examples"
        with pytest.raises(ValueError, match=message) as raised:
            getattr(model, call)(data, verbose=0)
        assert "\n" not in str(raised.value)

    def test_xla_is_refused_where_it_cannot_be(self, strategy: Any) -> None:
        with strategy.scope():
            model = dense_model()
            model.compile("sgd", "mse", jit_compile=True)
        with pytest.raises(ValueError, match=r"jit_compile=True(\): XLA can't compile| cannot hold)"):
            model.fit(X, Y, verbose=0)

    def test_policies_that_are_none_are_refused(self, strategy: Any) -> None:
        with pytest.raises(ValueError, match="policies must be a list of policies"):
            type(strategy)(policies=["backup"])


class Scaled(keras.Model):
    """Scales its features."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 3))

    def call(self, inputs: Any) -> Any:
        scales, x = inputs
        return self.dense(scales * x)


def small(strategy: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def fitting(model: keras.Model) -> Callable[..., Any]:
    return functools.partial(model.fit, X, Y, batch_size=8, verbose=0)


def predicting(model: keras.Model) -> Callable[[], Any]:
    return functools.partial(model.predict, X, batch_size=8, verbose=0)


class TwoRowsEach(keras.Sequential):
    def predict_step(self, data: Any) -> Any:
        return tf.repeat(super().predict_step(data), 2, axis=0)


class PenalizedOwn(own_models.stepping(own_models.mean_by_hand)):
    def __init__(self):
        super().__init__()
        self.penalty = own_models.Penalty()

    def call(self, x, training=False):
        return self.second(self.penalty(self.first(x)))


class Counting(keras.Model):
    """Adds up what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")
        self.scale = self.add_weight(name="scale")

    def call(self, x: Any) -> Any:
        return x * self.scale

    def train_step(self, data: Any) -> Any:
        self.seen.update_state(keras.ops.cast(data[0], "int32"))
        return {"seen": self.seen.result()}

    test_step = train_step


def numbers(batches: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for index in range(batches):
        batch = np.arange(4 * index, 4 * index + 4, dtype=np.float32)[:, None]
        yield batch, batch
