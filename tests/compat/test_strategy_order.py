# SPDX-License-Identifier: Apache-2.0
"""A program that builds a MirroredStrategy and a ParameterServerStrategy, in either order, or any of them too late."""

from __future__ import annotations

import pathlib

import programs
import pytest

import tfdist

pytestmark = pytest.mark.processes

BEGIN = """
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
def mirrored():
    return tfdist.MirroredStrategy(["/cpu:0", "/cpu:1"])
def parameter_server():
    return tfdist.ParameterServerStrategy(num_workers=1, num_ps=1)
def trains(strategy, data=DATA):
    made = model(strategy)
    losses = made.fit(data, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0], losses
    assert made.optimizer.iterations.numpy() == 12
    assert made.predict(X, verbose=0).shape == (64, 1)
    return made
"""


def run(script: str, directory: pathlib.Path) -> str:
    with programs.running(BEGIN + script, directory) as program:
        assert program.wait(100) == 0, program.output
        return program.output


@pytest.mark.slow
def test_parameter_server_first_and_what_was_only_built_before_it(tmp_path: pathlib.Path) -> None:
    """Also a strategy and a data set made before anything has joined a cluster."""
    script = """
    early = mirrored()
    servers = parameter_server()
    alone = trains(tf.distribute.get_strategy())
    for strategy in (servers, early, mirrored(), servers):
        trains(strategy)
    trains(servers, tf.data.Dataset.from_tensor_slices((X, Y)).batch(16))
    before, evaluated = alone.get_weights(), alone.evaluate(DATA, verbose=0)
    np.testing.assert_allclose(evaluated, np.mean((alone.predict(X, verbose=0) - Y) ** 2), rtol=1e-5)
    alone.fit(DATA, verbose=0)
    assert any((one != other).any() for one, other in zip(before, alone.get_weights()))
    print("all of them trained")
    """
    assert "all of them trained" in run(script.replace("\n    ", "\n"), tmp_path)


def test_a_mirrored_strategy_that_trained_first_says_which_line_to_move(tmp_path: pathlib.Path) -> None:
    script = """
    early = mirrored()
    made = trains(early)
    del made
    keras.backend.clear_session()
    servers = parameter_server()
    trains(servers)
    for again in (lambda: trains(early), lambda: trains(mirrored())):
        try:
            again()
        except RuntimeError as error:
            print("refused:", error)
    trains(servers)
    print("the parameter servers trained")
    """
    output = run(script.replace("\n    ", "\n"), tmp_path)
    refusals = [line for line in output.splitlines() if line.startswith("refused:")]
    assert len(refusals) == 2
    assert all("Move the line that builds ParameterServerStrategy above" in refusal for refusal in refusals)
    assert "the parameter servers trained" in output


def test_variables_made_first_say_which_line_to_move(tmp_path: pathlib.Path) -> None:
    """TensorFlow would read them and lose what is written to them."""
    script = """
    made = trains(tf.distribute.get_strategy())
    try:
        parameter_server()
    except RuntimeError as error:
        print("refused:", error)
    """
    output = run(script.replace("\n    ", "\n"), tmp_path)
    assert "refused: ParameterServerStrategy must be built before the first model or variable" in output
    assert "Move the line" in output


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("early = tf.ones([7, 3])", "a tensor of shape (7, 3) and dtype float32"),
        ("early = tf.Variable(tf.ones([7, 3]), name='early')", "variable 'early:0'"),
    ],
)
def test_worker_that_used_tensorflow_first_says_what_it_made(tmp_path: pathlib.Path, line: str, made: str) -> None:
    cluster = tfdist.Cluster({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, tfdist.Task("worker", 0))
    # A dead proxy raises when it is asked for its class.
    script = f"""
{line}
import weakref
gone = weakref.proxy({{1}})
try:
    tfdist.MultiWorkerMirroredStrategy()
except RuntimeError as error:
    print("refused:", error)
"""
    with programs.running(script, tmp_path, {"TF_CONFIG": cluster.to_tf_config()}) as program:
        assert program.wait(100) == 0, program.output
        assert "refused: MultiWorkerMirroredStrategy must be built before TensorFlow is used" in program.output
        assert f"restart the program first. Received: {made}\n" in program.output
