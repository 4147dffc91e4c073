# SPDX-License-Identifier: Apache-2.0
"""Rules for every test: it leaves nothing behind, and TensorFlow sees four CPUs and is quiet.

A test that leaves an environment variable, a thread that would keep Python alive, or a child process behind fails, and
what it left is removed so that the next test starts clean. Seeds it set are forgotten. Time limits per test are in
pyproject.toml (pytest-timeout).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import os
import pathlib
import random
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import hypothesis
import prefork
import psutil
import pytest

# For quietness only: nothing here changes what is computed. Child processes inherit it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Else pytest's workers have a terminal of 80 columns, and a single process that of who runs it.
os.environ["COLUMNS"] = "120"
# Several processes share a few cores, and the models are too small to be divided among threads.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
# Children find tfdist wherever they are started, and import Keras as sparingly as lean/sitecustomize.py says.
_TESTS = pathlib.Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS / "lean"), str(_TESTS.parent)])
# Each of hundreds of processes would compile all modules of tfdist anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# For this process too, which Python started without them.
gc.set_threshold(100_000, 50, 50)

# How long an example takes says more of what else the machine does than of the code.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], parent=hypothesis.settings()
)
hypothesis.settings.load_profile("untimed")

# A shell that starts this in the background has Ctrl-C ignored, and nohup has SIGHUP; children inherit that, and tests
# send both to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Files that take half a minute and more, begun first, so that at the end none runs alone: those that compute for
# minutes, between them those that mostly wait for processes, and then the shorter ones.
_LONGEST_FILES = (
    "test_parameter_server.py",
    "test_parameter_server_policies.py",
    "test_multi_worker_conformance.py",
    "test_multi_worker_failures.py",
    "test_mirrored_conformance.py",
    "test_embedded.py",
    "test_mirrored_loops_conformance.py",
    "test_slurm.py",
    "test_mirrored_policies_conformance.py",
    "test_resume_processes.py",
    "test_resume.py",
    "test_ssh.py",
    "test_compression_parameter_server.py",
    "test_communication.py",
    "test_mirrored.py",
    "test_training_with_replacements.py",
    "test_callback.py",
    "test_compression.py",
    "test_first_calls.py",
    "test_split_train_step.py",
    "test_on_devices.py",
    "test_processes.py",
    "test_recording.py",
    "test_warmup_devices.py",
    "test_examples.py",
    "test_page.py",
    "test_replaced_workers.py",
    "test_overlapping_calls.py",
    "test_parameter_averaging_mirrored.py",
    "test_resume_strategies.py",
    "test_tags.py",
    "test_resume_one_worker.py",
    "test_sharded_tables.py",
)
# What fails in these shows its values, too.
pytest.register_assert_rewrite("conformance", "training")
LOGICAL_CPUS = 4
_GRACE_SECS = 5.0
# Set by pytest itself, and by whichever test is the first to import TensorFlow, h5py, scikit-learn or JAX.
_NOT_OURS = {
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "TF2_BEHAVIOR",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
    "TPU_SKIP_MDS_QUERY",
}


class _SplitsCpu:
    """Splits the CPU as soon as TensorFlow is imported: whatever imports it may start its runtime, too."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "tensorflow" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def split(module: types.ModuleType) -> None:
            execute(module)
            _split_cpu()

        vars(spec.loader)["exec_module"] = split
        return spec


# Not in a hook: pytest imports the conftest.py of a folder that is an argument before it calls any.
sys.meta_path.insert(0, _SplitsCpu())


@pytest.fixture(scope="session")
def cpus() -> list[str]:
    """Names of the logical CPU devices, `LOGICAL_CPUS` of them."""
    import tensorflow as tf

    _split_cpu()
    return [device.name for device in tf.config.list_logical_devices("CPU")]


def pytest_configure(config: pytest.Config) -> None:
    """Starts what forks programs, once for all processes of a run."""
    if prefork.VARIABLE not in os.environ:
        stack = contextlib.ExitStack()
        stack.enter_context(prefork.servers())
        config.add_cleanup(stack.close)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests that a class of `tests/conformance` inherits."""
    tests = getattr(getattr(item, "cls", None), "other_tests", dict)()
    for mark in tests.get(getattr(item, "originalname", item.name), ()):
        item.add_marker(mark)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first."""
    order = {name: index for index, name in enumerate(_LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Splits the CPU before any test can start TensorFlow's runtime, which fixes the number of devices."""
    if "tensorflow" in sys.modules:
        _split_cpu()


def _split_cpu() -> None:
    import tensorflow as tf

    _leave_untuned()
    cpu = tf.config.list_physical_devices("CPU")[0]
    if not tf.config.get_logical_device_configuration(cpu):
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS)


def _leave_untuned() -> None:
    """Switches tf.data's autotuning off unless a test decides: it holds up who deletes an iterator on a busy machine.

    tfdist/compat/tensorflow/inputs.py tells why. tfdist does so where it may; trainings on one device, with which tests
    compare, would wait as long as they had taken, after each pass.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import dataset_ops

    plain = dataset_ops.DatasetV2._apply_debug_options
    if hasattr(plain, "leaves_untuned"):
        return

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        dataset = plain(dataset)
        if dataset.options().autotune.enabled is not None:
            return dataset
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)

    vars(apply)["leaves_untuned"] = True
    dataset_ops.DatasetV2._apply_debug_options = apply


@pytest.fixture(autouse=True, scope="module")
def is_collected_once() -> Iterator[None]:
    """Freezes objects that a module leaves for good, such as graphs of TensorFlow, so that each is collected once."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails the test that changes the environment or leaves a thread or a process."""
    children = set() if _has_no_child() else set(_children())
    before = dict(os.environ), set(threading.enumerate()), children
    yield
    _forget_seeds()
    leaks = [*_environment_leaks(before[0]), *_thread_leaks(before[1]), *_process_leaks(before[2])]
    if leaks:
        pytest.fail("this test left behind: " + "; ".join(leaks), pytrace=False)


def _forget_seeds() -> None:
    """Undoes keras.utils.set_random_seed: a data set with a global seed shuffles alike in every copy."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if tf := sys.modules.get("tensorflow"):
        tf.random.set_seed(None)


def _environment_leaks(before: dict[str, str]) -> list[str]:
    after = dict(os.environ)
    names = sorted(name for name in (before.keys() | after.keys()) - _NOT_OURS if before.get(name) != after.get(name))
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name} ({before.get(name)!r} is now {after.get(name)!r})" for name in names]


def _thread_leaks(before: set[threading.Thread]) -> list[str]:
    """Threads that are not daemons: Python can't end before they do."""
    new = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in new:
        thread.join(_GRACE_SECS)
    return [f"thread {thread.name!r}" for thread in new if thread.is_alive()]


def _process_leaks(before: set[psutil.Process]) -> list[str]:
    if _has_no_child():
        return []
    new = [child for child in _children() if child not in before and not _is_below(child, before)]
    _, alive = psutil.wait_procs(new, timeout=_GRACE_SECS)
    leaks = [f"process {child.pid} ({_command(child)})" for child in alive]
    for child in alive:
        child.kill()
    return leaks


def _is_below(process: psutil.Process, others: set[psutil.Process]) -> bool:
    """Returns True if one of `others` started it: a cluster that outlives a test starts its data workers anew."""
    try:
        return not others.isdisjoint(process.parents())
    except psutil.Error:
        return False


def _has_no_child() -> bool:
    """Asks the kernel, in microseconds; to look through all processes of the machine takes milliseconds."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _children() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    # multiprocessing keeps one of these for itself, for as long as Python runs.
    return [child for child in children if "multiprocessing.resource_tracker" not in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "gone"
