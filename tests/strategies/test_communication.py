# SPDX-License-Identifier: Apache-2.0
"""The argument `communication`: the numbers are those of one device by every transport, and what can't be is said."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import process_cluster
import pytest
from process_cluster import needs_mpi

import tfdist
from tfdist.strategies import _communication
from tfdist.transport import mpi

CASES = [
    "uneven batches",
    "several steps at once",
    "accumulation, clipping and averages",
    "loss scale",
    "eagerly",
    "sum loss",
]
CPUS = ["/job:worker/replica:0/task:0/device:CPU:0"]

PREPARED = """
import itertools
from tfdist.transport import buckets, mpi
buckets.BUCKET_BYTES = 256  # so that a model has several
mpi._SMALL_BYTES = 128
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60)
layers, random = keras.layers, np.random.default_rng(0)
x, y = random.normal(size=(45, 6)).astype("float32"), random.normal(size=(45, 1)).astype("float32")
words = random.integers(0, 9, (45, 4))

def dense():
    return keras.Sequential([keras.Input((6,)), layers.Dense(16, "tanh"), layers.BatchNormalization(), layers.Dense(1)])
def rows():
    return keras.Sequential([keras.Input((4,)), layers.Embedding(9, 3), layers.Flatten(), layers.Dense(1)])
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
CASES = {
    "uneven batches": (rows, words, lambda: Adam(0.01), {}),
    "several steps at once": (rows, words, lambda: SGD(0.1), {"steps_per_execution": 4}),
    "accumulation, clipping and averages": (rows, words, lambda: SGD(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3), {}),
    "loss scale": (rows, words, lambda: keras.optimizers.LossScaleOptimizer(Adam(0.01)), {}),
    "eagerly": (rows, words, lambda: SGD(0.1), {"run_eagerly": True}),
    "sum loss": (rows, words, lambda: SGD(0.01), {"loss": keras.losses.MeanSquaredError(reduction="sum")}),
}
def trained(scope, make, inputs, optimizer, options, is_evaluated=True):
    keras.utils.set_random_seed(1)
    with scope.scope():
        model = make()
        model.compile(optimizer(), **{"loss": "mse", "metrics": ["mae"], **options})
    history = model.fit(inputs, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(inputs, y, batch_size=8, verbose=0) if is_evaluated else []
    weights, iterations = [each.tolist() for each in model.get_weights()], int(model.optimizer.iterations.numpy())
    return weights, history, evaluated, iterations
"""

EQUALITY = """
for name, case in CASES.items():
    if name not in CHOSEN:
        continue
    # A test step does not depend on the optimizer.
    is_evaluated = name not in ("accumulation, clipping and averages", "loss scale")
    report(name, trained(strategy, *case, is_evaluated))
    if index == 0:
        report(f"one device, {name}", trained(tf.distribute.get_strategy(), *case, is_evaluated))
# Each replica has statistics of its own batch: equal on all workers, not to one device's.
report("by MPI", strategy._sums._sum_array is not None)
report("statistics", trained(strategy, dense, x, lambda: SGD(0.1), {}))
own = strategy.distribute_datasets_from_function(lambda c: tf.data.Dataset.from_tensors(c.input_pipeline_id + 1.0))
report("reduced", float(strategy.reduce("SUM", strategy.run(lambda value: value, (next(iter(own)),)), axis=None)))

"""


def assert_close(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_close(*pair)
    else:
        assert one == pytest.approx(other, abs=2e-5, rel=2e-4)


@pytest.mark.processes
@pytest.mark.timeout(300)
@needs_mpi
@pytest.mark.parametrize(
    "chosen",
    # MPI sums in a step, in a step of several and in an eager one; what becomes of the sum is TensorFlow's matter.
    [
        pytest.param(CASES, id="all", marks=pytest.mark.slow),
        # Taken by itself.
        pytest.param(["several steps at once"], id="in a step"),
    ],
)
def test_numbers_by_mpi_are_those_of_one_device(
    chosen: Sequence[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TFDIST_COMMUNICATION", "mpi" if chosen == CASES else "auto")
    script = PREPARED + f"CHOSEN = {chosen!r}\n" + EQUALITY
    first, *others = process_cluster.run(script, tmp_path, num_workers=3, timeout_secs=280)
    assert first["by MPI"]
    names = [name for name in first if f"one device, {name}" in first]
    assert len(names) == len(chosen)
    for name in names:
        assert_close(first[name], first[f"one device, {name}"])
    for other in others:
        assert {name: other[name] for name in [*names, "statistics", "reduced"]} == {
            name: first[name] for name in [*names, "statistics", "reduced"]
        }
    assert first["reduced"] == 6.0


@pytest.mark.processes
@pytest.mark.timeout(300)
@needs_mpi
@pytest.mark.parametrize(
    ("options", "alone"),
    [
        # `test_compression.py` has an average by MPI; a warmup phase ends with a sum, too.
        ("policies=[tfdist.BackupWorkers(spares=0)]", ""),
        ("transforms=[T.identity('replica'), T.clip_by_global_norm(0.1)]", "global_clipnorm=0.1"),
    ],
    ids=["policy", "transforms"],
)
def test_what_is_changed_beside_sums_by_mpi_is_as_on_one_device(
    options: str, alone: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TFDIST_COMMUNICATION", "mpi")
    script = PREPARED.replace("(start_timeout_secs=60)", f"(start_timeout_secs=60, {options})")
    script += f"""
def of(scope, **clip):
    return trained(scope, rows, words, lambda: SGD(0.5, **clip), {{}}, is_evaluated=False)
report("found", of(strategy))
if index == 0:
    report("alone", of(tf.distribute.get_strategy(), {alone}))
"""
    first, second = process_cluster.run("T = tfdist.transforms\n" + script, tmp_path, timeout_secs=140)
    assert first["found"] == second["found"]
    assert_close(first["found"], first["alone"])


@pytest.mark.parametrize("value", ["gloo", "MPI", None, 1])
def test_another_word_is_refused_at_once(value: Any):
    with pytest.raises(ValueError, match=r"communication must be one of 'auto', 'tensorflow', 'mpi'\. Received"):
        tfdist.MultiWorkerMirroredStrategy(communication=value)


class Alone:
    """An agreement of one worker."""

    tasks = ("worker:0",)
    task, is_chief = tasks[0], True

    def gather(self, value: Any, what: str) -> dict[str, Any]:
        return {self.task: value}

    def from_chief(self, value: Any, what: str) -> Any:
        return value()


class BesideAnotherLibrary(Alone):
    """An agreement with a worker that has MPICH 4.1."""

    tasks = ("worker:0", "worker:1")

    def gather(self, value: Any, what: str) -> dict[str, Any]:
        return {"worker:0": value, "worker:1": {**value, "library": "MPICH 4.1"}}


def refusal_of_mpi(agreement: Any, devices: Sequence[str] = CPUS) -> str:
    """Returns the line that refuses communication="mpi"."""
    with pytest.raises(ValueError, match=r"^communication='mpi': [^\n]*$") as caught:
        _communication.connect("mpi", agreement, devices, 60.0)
    return str(caught.value).removeprefix("communication='mpi': ")


@pytest.fixture
def installed_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "is_installed", lambda: True)
    monkeypatch.setattr(mpi, "size_of_job", lambda: None)
    monkeypatch.setattr(mpi, "library_name", lambda: "MPICH 5.0.2")


def test_gpus_are_left_to_nccl():
    line = refusal_of_mpi(Alone(), [CPUS[0].replace("CPU", "GPU")])
    assert line.startswith("on worker:0, it sums on CPUs only; use 'auto'") and line.endswith("device:GPU:0")


def test_a_missing_mpi4py_is_said_with_what_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpi, "is_installed", lambda: False)
    assert (
        refusal_of_mpi(Alone()) == "on worker:0, it needs mpi4py and an MPI library: pip install '.[mpi]' in a checkout"
    )


@pytest.mark.usefixtures("installed_mpi")
def test_open_mpi_without_its_launcher_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpi, "library_name", lambda: "Open MPI 5.0.11")
    line = refusal_of_mpi(Alone())
    assert line.startswith("on worker:0, Open MPI 5.0.11 needs a launcher of its own; start the tasks with mpiexec or")
    assert line.endswith("Received: none has")


@pytest.mark.usefixtures("installed_mpi")
def test_different_libraries_are_named_by_task():
    assert refusal_of_mpi(BesideAnotherLibrary()) == (
        "all workers must use one MPI library. Received: worker:0: MPICH 5.0.2, worker:1: MPICH 4.1"
    )


def test_an_mpi_launcher_without_a_cluster_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in ("TF_CONFIG", "TFDIST_COMMUNICATION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mpi, "size_of_job", lambda: 2)
    with pytest.raises(ValueError, match=r"^communication='mpi': an MPI launcher has started 2 processes, .*TF_CONFIG"):
        tfdist.MultiWorkerMirroredStrategy(communication="mpi")
    _communication.check_alone("auto")
    assert "started 2 processes. Without TF_CONFIG each trains alone; set TF_CONFIG" in capsys.readouterr().err
    monkeypatch.setattr(mpi, "size_of_job", lambda: None)
    _communication.check_alone("mpi")
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("installed_mpi")
def test_auto_says_that_no_worker_could_start_its_library(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(mpi, "untried", lambda name: f"{name} could not be started: no shared memory")
    assert _communication.connect("auto", Alone(), CPUS, 60.0) is None
    assert "and not MPI: on worker:0, MPICH 5.0.2 could not be started: no shared memory" in capsys.readouterr().err


@pytest.mark.usefixtures("installed_mpi")
def test_auto_takes_a_library_that_needs_no_launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpi, "untried", lambda name: "")
    assert _communication._local_state("auto", CPUS, 2) == {"library": "MPICH 5.0.2"}
    monkeypatch.setattr(mpi, "library_name", lambda: "Open MPI 5.0.11")
    assert "problem" in _communication._local_state("auto", CPUS, 2)


@pytest.mark.processes
@pytest.mark.timeout(120)
@needs_mpi
def test_first_sums_that_fail_leave_it_to_tensorflow(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TFDIST_COMMUNICATION", "auto")
    script = """
    from tfdist.transport import mpi
    mpi.FIRST_SUMS_SECS = 3.0
    if index == 1:
        mpi.Mpi._are_done = lambda self, requests: False
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60)
    report("sum", float(strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)))
    """
    with process_cluster.workers(script, tmp_path) as running:
        assert [worker.wait() for worker in running] == [0, 0]
        assert [worker.found for worker in running] == [{"sum": 2.0}] * 2
        (line,) = [line for line in running[0].output.splitlines() if "not MPI" in line]
    assert re.search(r"on worker:\d, MPI's first sum has not completed within 3 s; a firewall may keep", line)


@pytest.mark.parametrize("value", ["MPI", "tf"])
def test_a_wrong_word_in_the_environment_is_refused_with_the_variable(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("TFDIST_COMMUNICATION", value)
    with pytest.raises(ValueError, match=f"TFDIST_COMMUNICATION must be one of .* Received: '{value}'"):
        _communication._asked("auto")
    assert _communication._asked("tensorflow") == "tensorflow"
    monkeypatch.setenv("TFDIST_COMMUNICATION", "")
    assert _communication._asked("auto") == "auto"


def test_a_launcher_of_another_job_is_not_this_one_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpi, "size_of_job", lambda: 3)
    monkeypatch.setattr(mpi, "is_installed", lambda: True)
    monkeypatch.setattr(mpi, "library_name", lambda: "Open MPI 5.0.11")
    (problem,) = _communication._local_state("mpi", CPUS, 2).values()
    assert problem.endswith("Received: it has started 3 processes for 2 workers")
    monkeypatch.setattr(mpi, "library_name", lambda: "MPICH 5.0.2")
    assert _communication._local_state("mpi", CPUS, 2) == {"library": "MPICH 5.0.2"}


@pytest.fixture
def failing_mpi(installed_mpi: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any) -> None:
        raise RuntimeError("the MPI job has another number of processes than the cluster")

    monkeypatch.setattr(mpi, "size_of_job", lambda: 1)
    monkeypatch.setattr(mpi, "start", start)


@pytest.mark.usefixtures("failing_mpi")
def test_mpi_that_cannot_be_started_is_an_error_with_the_task():
    with pytest.raises(RuntimeError, match=r"^communication='mpi': on worker:0, the MPI job has another number"):
        _communication.connect("mpi", Alone(), CPUS, 60.0)


@pytest.mark.usefixtures("failing_mpi")
def test_auto_goes_on_without_mpi_and_says_so(capsys: pytest.CaptureFixture[str]):
    assert _communication.connect("auto", Alone(), CPUS, 60.0) is None
    said = capsys.readouterr().err
    assert "the workers use TensorFlow's collectives and not MPI: on worker:0, the MPI job has another" in said


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_workers_that_ask_for_different_transports_are_refused(tmp_path: pathlib.Path):
    script = """
    try:
        tfdist.MultiWorkerMirroredStrategy(communication=["tensorflow", "mpi"][index], start_timeout_secs=60)
    except ValueError as error:
        report("error", str(error))
    """
    for found in process_cluster.run(script, tmp_path):
        assert found["error"] == (
            "communication must be the same on all workers. Received: worker:0: 'tensorflow', worker:1: 'mpi'"
        )
