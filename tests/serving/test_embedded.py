# SPDX-License-Identifier: Apache-2.0
"""Processes of a parameter-server cluster: who starts, who waits for whom, and that all end with the program."""

from __future__ import annotations

import pathlib
import re
import shutil
import signal
import subprocess
import textwrap
from typing import Any

import programs
import psutil
import pytest

import tfdist
from tfdist import Cluster, Task
from tfdist.compat.tensorflow import context

# By then all are gone, on a busy machine too; in practice it takes a second or two.
ENDED_WITHIN_SECS = 30.0

# What makes no sense is refused before anything starts.


@pytest.mark.devices
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_workers", wrong) for wrong in (0, -1, True, 1.5)),
        *(("num_ps", wrong) for wrong in (0, "2")),
        *(("data_sharding", wrong) for wrong in ("x", None)),
        *(("transfer", wrong) for wrong in ("fast", None)),
        ("policies", [1]),
        *(("devices_per_replica", wrong) for wrong in (0, 3)),
        *(("start_timeout_secs", wrong) for wrong in (0, -1.0)),
    ],
)
def test_arguments_that_make_no_sense(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as raised:
        tfdist.ParameterServerStrategy(**{name: value})
    assert f"{name}={value!r}" in str(raised.value)
    assert "\n" not in str(raised.value)


def chief_of(*workers: str, ps: str = "127.0.0.1:1") -> str:
    jobs = {"chief": ["127.0.0.1:2"], "worker": list(workers), "ps": [ps]}
    return Cluster({job: dict(enumerate(tasks)) for job, tasks in jobs.items()}, Task("chief", 0)).to_tf_config()


@pytest.mark.devices
@pytest.mark.parametrize(
    ("workers", "named"),
    [
        (["no-such-host.invalid:2222"], ["worker:0", "no-such-host.invalid:2222"]),
        (["127.0.0.1:9", "127.0.0.1:10"], ["worker:0", "worker:1", "127.0.0.1:9"]),
    ],
    ids=["unresolvable", "unreachable"],
)
def test_tasks_that_do_not_come_up_are_named(
    monkeypatch: pytest.MonkeyPatch, workers: list[str], named: list[str]
) -> None:
    # What other tests of this process have left must not be what the constructor stops at.
    monkeypatch.setattr(context, "_variables", list)
    monkeypatch.setenv("TF_CONFIG", chief_of(*workers))
    with pytest.raises(TimeoutError) as raised:
        tfdist.ParameterServerStrategy(start_timeout_secs=0.2)
    message = str(raised.value)
    assert "\n" not in message
    assert "start_timeout_secs" in message
    for name in (*named, "ps:0"):
        assert name in message


@pytest.mark.devices
@pytest.mark.parametrize(
    ("task", "missing"), [("chief", "ps"), ("chief", "worker"), ("worker", "chief"), ("evaluator", None)]
)
def test_a_cluster_without_a_job_or_a_chief_is_refused(
    monkeypatch: pytest.MonkeyPatch, task: str, missing: str | None
) -> None:
    jobs = {job: {0: f"127.0.0.1:{port}"} for port, job in enumerate(("ps", "chief", "worker"), 1) if job != missing}
    monkeypatch.setenv("TF_CONFIG", Cluster(jobs, Task(task, 0)).to_tf_config())
    with pytest.raises(tfdist.cluster.ClusterError, match=missing or task):
        tfdist.ParameterServerStrategy(start_timeout_secs=0.2)


# However the program ends, its cluster ends with it. (Returning and raising are in the tests after these.)

EMBEDDED = """
strategy = tfdist.ParameterServerStrategy(num_workers=1, num_ps=1)
made = model(strategy)
made.fit(X, Y, verbose=0)
print("trained", flush=True)
"""
TRAIN_ON = "made.fit(tf.data.Dataset.from_tensors((X, Y)).repeat(), steps_per_epoch=10**6, verbose=0)"
ENDINGS = {
    "SIGTERM": (TRAIN_ON, signal.SIGTERM, -signal.SIGTERM),
    "Ctrl-C": (TRAIN_ON, signal.SIGINT, 130),
    "SIGKILL": (TRAIN_ON, signal.SIGKILL, -signal.SIGKILL),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "ending", ["SIGKILL", *(pytest.param(each, marks=pytest.mark.slow) for each in ("SIGTERM", "Ctrl-C"))]
)
def test_an_embedded_cluster_ends_with_its_program(tmp_path: pathlib.Path, ending: str) -> None:
    last_line, signum, code = ENDINGS[ending]
    with programs.running(EMBEDDED + last_line, tmp_path) as program:
        program.wait_for_output("trained")
        assert len(program.family()) >= 3, "the program, a worker and a ps"
        program.process.send_signal(signum)
        # Python itself ends with -2 after an interrupt that nobody handles, and a shell shows that as 130.
        assert program.wait(ENDED_WITHIN_SECS) in (code, -signal.SIGINT if code == 130 else code), program.output
        assert_nobody_is_left(program)


def assert_nobody_is_left(program: programs.Program) -> None:
    psutil.wait_procs(program.family(), timeout=ENDED_WITHIN_SECS)
    assert program.family() == []


# For scripts: waits for what sends no signal; sleeps only between two looks.
COUNTING = """
import warnings
warnings.simplefilter("always")
strategy = tfdist.ParameterServerStrategy(num_workers=2, num_ps=1, stall_timeout_secs=4.0)
embedded = strategy.distribution.serving.embedded

class Counting(keras.Sequential):
    def train_step(self, ids):
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(ids, 400), 0))
        return super().train_step((tf.ones([tf.shape(ids)[0], 1]), tf.ones([tf.shape(ids)[0], 1])))

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if worker and batch == 60 and self.kills:
            self.kills = False
            os.kill(embedded.pid(worker), signal.SIGKILL)
    def on_epoch_begin(self, epoch, logs=None):
        made.counts.assign(tf.zeros([400]))
        self.kills = epoch == 0
    def on_epoch_end(self, epoch, logs=None):
        counts = made.counts.numpy()
        print("used", int(counts.min()), int(counts.max()), int(counts.sum()), flush=True)

with strategy.scope():
    made = Counting([keras.Input((1,)), keras.layers.Dense(1)])
    made.counts = tf.Variable(tf.zeros([400]), trainable=False)
    made.compile("sgd", "mse")
ids = tf.data.Dataset.range(400)
counted = ids.shuffle(400).batch(2)
"""


@pytest.mark.processes
def test_killed_worker_leaves_every_example_used_once(tmp_path: pathlib.Path) -> None:
    script = """
        # Nobody starts it again.
        embedded._start = lambda task: embedded._processes[str(task)]
        uncounted = ids.batch(2).filter(lambda batch: True)
        for worker, data in ((None, counted), ("worker:1", counted), (None, uncounted)):
            made.fit(data, epochs=2, verbose=0, callbacks=[Kill()])

        def own(context):
            return counted.shard(context.num_input_pipelines, context.input_pipeline_id)

        made.fit(strategy.distribute_datasets_from_function(own), verbose=2, epochs=2)
        print("evaluated", made.evaluate(tf.ones([4, 1]), tf.ones([4, 1]), verbose=0), flush=True)
        worker = "worker:0"
        made.fit(counted.repeat(), steps_per_epoch=10**6, verbose=0, callbacks=[Kill()])
    """
    with programs.running(COUNTING + textwrap.dedent(script), tmp_path) as program:
        assert program.wait(110) == 1, program.output
        used = [tuple(map(int, line.split()[1:])) for line in program.output.splitlines() if line.startswith("used")]
        assert len(used) == 6, program.output
        # The batch of the step that was under way may be used twice.
        assert all(least == 1 and most <= 2 and total <= 400 + 2 for least, most, total in used), program.output
        assert used[0] == used[1] == used[3] == used[4] == used[5] == (1, 1, 400), program.output
        assert "ended without 100 of its 200 batches. worker:1 was lost, and no other worker can" in program.output
        assert program.output.count("\n100/200 - ") == 2 and "200/200" not in program.output, program.output
        assert "evaluated" in program.output
        assert "TimeoutError: no step has completed for 4 s; still waiting for worker:0 (lost" in program.output
        assert "worker:1 (lost; it has to be started again)" in program.output
        assert_nobody_is_left(program)


@pytest.mark.processes
def test_a_killed_parameter_server_is_an_error_and_no_hang(tmp_path: pathlib.Path) -> None:
    script = (
        EMBEDDED
        + """
class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            os.kill(strategy.distribution.serving.embedded.pid("ps:0"), signal.SIGKILL)
try:
    made.fit(tf.data.Dataset.from_tensors((X, Y)).repeat(), steps_per_epoch=10**6, verbose=0, callbacks=[Kill()])
except tf.errors.UnavailableError as error:
    print("caught:", error.message, flush=True)
    raise
"""
    )
    with programs.running(script, tmp_path) as program:
        assert program.wait(100) == 1, program.output
        assert re.search(r"caught: ps:0 \(127.0.0.1:\d+\) is lost, and its variables with it; start", program.output)
        assert "ps:0 ended with code -9" in program.output
        assert_nobody_is_left(program)


@pytest.mark.processes
def test_a_process_that_can_not_start_is_an_error_at_once(tmp_path: pathlib.Path) -> None:
    """A worker that ends before it serves is not waited for."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'ps' in os.environ.get('TF_CONFIG', '').partition('task')[2]: raise SystemExit('no libfoo.so')\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{programs.ROOT}"}
    with programs.running("tfdist.ParameterServerStrategy(num_workers=1)", tmp_path, env) as program:
        assert program.wait(60) == 1
        assert "ps:0 of the embedded cluster ended with code" in program.output
        assert "no libfoo.so" in program.output


OPERATION = """
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"

static void shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

static void compute(void* kernel, TF_OpKernelContext* context) {
  TF_Tensor* input;
  TF_Status* status = TF_NewStatus();
  TF_GetInput(context, 0, &input, status);
  TF_SetOutput(context, 0, input, status);
  TF_DeleteTensor(input);
  TF_DeleteStatus(status);
}

__attribute__((constructor)) static void add() {
  TF_Status* status = TF_NewStatus();
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder("OwnA");
  TF_OpDefinitionBuilderAddInput(op, "x: float");
  TF_OpDefinitionBuilderAddOutput(op, "y: float");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, &shape);
  TF_RegisterOpDefinition(op, status);
  TF_RegisterKernelBuilder("OwnA", TF_NewKernelBuilder("OwnA", "CPU", nullptr, &compute, nullptr), status);
  TF_DeleteStatus(status);
}
"""


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles an operation")
def test_servers_load_operations_before_and_after_their_start(tmp_path: pathlib.Path) -> None:
    import tensorflow as tf

    (tmp_path / "own.cc").write_text(OPERATION)
    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags(), "-l:libtensorflow_cc.so.2"]
    first, second = tmp_path / "a.so", tmp_path / "b.so"
    command = ["g++", "-shared", "-fPIC", str(tmp_path / "own.cc"), "-o", str(first), *flags]
    subprocess.run(command, check=True, timeout=100)
    second.write_bytes(first.read_bytes().replace(b"OwnA", b"OwnB"))
    script = f"""
    from tfdist.compat.tensorflow import servers

    first = tf.load_op_library({str(first)!r})
    strategy = tfdist.ParameterServerStrategy(num_workers=1)
    made = model(strategy)
    second = tf.load_op_library({str(second)!r})
    changed = lambda x, y: (tf.ensure_shape(second.own_b(x=first.own_a(x=x)), (None, 4)), y)
    made.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).map(changed), verbose=0)
    print("trained", flush=True)
    servers.op_libraries = lambda: ["/no/such.so"]
    made.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(16), verbose=0)
    """
    with programs.running(textwrap.dedent(script), tmp_path) as program:
        assert program.wait() == 0, program.output
        assert "trained" in program.output
        line = "worker:0 can't load operations: /no/such.so: cannot open"
        (said,) = (each for each in program.output.splitlines() if line in each)
        assert said.endswith("import its package above the line that builds the strategy")


@pytest.mark.slow
@pytest.mark.processes
def test_a_constructor_that_raises_ends_its_processes_and_another_follows(tmp_path: pathlib.Path) -> None:
    script = """
    import psutil
    from tfdist.engines import server_calls

    def refused(**options):
        try:
            tfdist.ParameterServerStrategy(num_workers=1, **options)
        except BaseException as error:
            print(type(error).__name__, len(psutil.Process().children()), flush=True)

    def interrupted(*args):
        raise KeyboardInterrupt

    refused(start_timeout_secs=0.01)
    check, server_calls.check_codecs = server_calls.check_codecs, interrupted
    refused(policies=[tfdist.Compression(tfdist.compression.Threshold())])
    server_calls.check_codecs = check
    model(tfdist.ParameterServerStrategy(num_workers=1)).fit(X, Y, verbose=0)
    print("trained")
    """
    with programs.running(textwrap.dedent(script), tmp_path) as program:
        assert program.wait() == 0, program.output
        for line in ("TimeoutError 0", "KeyboardInterrupt 0", "trained"):
            assert line in program.output


@pytest.mark.processes
def test_an_embedded_cluster_runs_nothing_of_the_directory_and_exits(tmp_path: pathlib.Path) -> None:
    """The program is elsewhere, never imports from the working directory, and ends with `sys.exit`."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("token", "numpy", "secrets"):
        (work / f"{name}.py").write_text("print('imported from the working directory')\nraise SystemExit(9)\n")
    with programs.running(f"os.chdir({str(work)!r})\n" + EMBEDDED + "sys.exit(3)", tmp_path) as program:
        assert program.wait(100) == 3, program.output
        assert "trained" in program.output
        assert_nobody_is_left(program)
