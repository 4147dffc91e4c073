# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: runs each test in the scope of a strategy and records its outcome, for run.py beside it.

The environment variable `TFDIST_KERAS_TESTS` holds, as JSON, the `kind` of strategy, the directory `results`, the
test ids that are `done`, which are left out, and whether `jit_compile=True` means what it says (`xla`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
import types
import unittest
import zlib
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import pytest
import tensorflow as tf
from keras.src import testing
from keras.src.trainers import trainer
from tensorflow.python.eager import context

import tfdist

# Imported by Keras' tests for backends other than TensorFlow, which are skipped.
_STAND_INS = ("jax", "conftest")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the strategy before any test is imported."""
    config.addinivalue_line("markers", "requires_trainable_backend: a marker of Keras'")
    config.pluginmanager.register(_Session(**json.loads(os.environ["TFDIST_KERAS_TESTS"])))


class _Session:
    def __init__(self, kind: str, results: str, done: list[str], xla: bool = True) -> None:
        self._done = set(done)
        task = tfdist.Cluster.from_environment().task if kind == "multi" else None
        self._task = task.index if task else 0
        self._workers = 2 if kind == "multi" else 1
        self._results = pathlib.Path(results)
        self._log = (self._results / f"{self._task}.jsonl").open("a", buffering=1)
        self._problems: dict[str, str] = {}
        self._began = time.monotonic()
        self._test, self._meetings = "", itertools.count()
        self._strategy = _strategy(kind)
        _use(self._strategy)
        self._scope: Callable[[], Any] | None = None
        self._enter_scope_in_set_up()
        if not xla:
            trainer.Trainer.jit_compile = property(lambda self: False, lambda self, value: None)
        if kind == "multi":
            # `get_test_data` seeds by chance, and all workers must have the same data.
            seed = np.random.seed
            np.random.seed = lambda given=None: seed(0 if given is None else given)
            self._share_temporary_directories()
            self._remove_files_together()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        for name in _STAND_INS:
            if name not in sys.modules and (name == "conftest" or importlib.util.find_spec(name) is None):
                sys.modules[name] = _stand_in(name)

    @pytest.hookimpl(trylast=True)  # behind -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for name in _STAND_INS:
            if isinstance(sys.modules.get(name), _StandIn):
                del sys.modules[name]  # else Keras takes the package for an installed one
        (self._results / f"collected.{self._task}.json").write_text(json.dumps([item.nodeid for item in items]))
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record(report.nodeid, "failed", _line(report))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._began, self._problems = time.monotonic(), {}
        self._test, self._meetings = item.nodeid, itertools.count()
        self._write(id=item.nodeid, outcome="begun")
        self._forget_seeds()
        yield

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> None:
        self._wait_for_others(item.nodeid)
        # Tests of distribution enter the scope by themselves, where they want to.
        self._scope = None if self._strategy is None or "distribute" in item.path.name else self._strategy.scope

    def _enter_scope_in_set_up(self) -> None:
        """Enters the scope behind Keras' `setUp`, which resets the graph that holds a scope's variable creators."""
        set_up = testing.TestCase.setUp

        @functools.wraps(set_up)
        def set_up_in_scope(test: unittest.TestCase) -> None:
            set_up(test)
            if self._scope is not None:
                test.enterContext(self._scope())

        testing.TestCase.setUp = set_up_in_scope

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._problems.setdefault(report.outcome, _line(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        for outcome in ("failed", "skipped"):
            if outcome in self._problems:
                return self._record(nodeid, outcome, self._problems[outcome])
        return self._record(nodeid, "passed", "")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Else the launcher takes the failure of a test for that of its worker and ends the others.
        session.exitstatus = 0

    def _forget_seeds(self) -> None:
        """Gives each test the same random numbers, and all workers one global seed, as their strategy does."""
        random.seed(0)
        np.random.seed(0)
        tf.random.set_seed(None if self._workers == 1 else 1)

    def _record(self, nodeid: str, outcome: str, line: str) -> None:
        self._write(id=nodeid, outcome=outcome, line=line, secs=round(time.monotonic() - self._began, 1))

    def _write(self, **values: Any) -> None:
        self._log.write(json.dumps(values) + "\n")

    def _wait_for_others(self, nodeid: str) -> None:
        """Keeps a worker whose test failed early out of the collectives of the others' test."""
        for other in set(range(self._workers)) - {self._task}:
            path = self._results / f"{other}.jsonl"
            while not path.exists() or f'"id": {json.dumps(nodeid)}' not in path.read_text():
                time.sleep(0.02)

    def _share_temporary_directories(self) -> None:
        """Gives all workers the same directories, as hosts with a shared file system have them."""
        made, rmtree = iter(range(10**9)), shutil.rmtree

        def make(*_: Any, **__: Any) -> str:
            path = self._results / "shared" / f"{len(self._done)}_{next(made)}"
            path.mkdir(parents=True, exist_ok=True)
            return str(path)

        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            if self._results / "shared" != pathlib.Path(path).parent:  # others may not have finished with that
                rmtree(path, *args, **kwargs)

        class Shared(tempfile.TemporaryDirectory):
            """The directory of all workers where a test makes one."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                if _is_called_by_test():
                    self.cleanup()
                    self.name = make()

        testing.TestCase.get_temp_dir, shutil.rmtree, tempfile.TemporaryDirectory = make, remove, Shared

    def _remove_files_together(self) -> None:
        """Lets no worker's test remove a file of all workers before the others have seen it, nor more than once."""
        remove = os.remove

        def remove_once(path: Any, **kwargs: Any) -> None:
            if not _is_called_by_test() or self._results / "shared" not in pathlib.Path(path).parents:
                remove(path, **kwargs)
                return
            self._meet()
            if self._task == 0:
                remove(path, **kwargs)
            self._meet()

        os.remove = remove_once

    def _meet(self) -> None:
        """Waits for all workers, as often as each calls this in a test."""
        name = f"meeting.{zlib.crc32(self._test.encode())}.{next(self._meetings)}"
        paths = [self._results / f"{name}.{worker}" for worker in range(self._workers)]
        paths[self._task].touch()
        while not all(path.exists() for path in paths):
            time.sleep(0.02)


class _StandIn(types.ModuleType):
    """An empty module in place of a package that is not installed."""


def _stand_in(name: str) -> types.ModuleType:
    module: Any = _StandIn(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if name == "conftest":  # of Keras' repository, which its wheel lacks
        module.skip_if_backend = lambda backend, reason: pytest.mark.skipif(backend == "tensorflow", reason=reason)
    return module


def _strategy(kind: str) -> Any:
    if kind == "mirrored":
        devices = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        return tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
    if kind == "multi":
        return tfdist.MultiWorkerMirroredStrategy()
    if kind in ("ps", "backup"):
        policies = [tfdist.BackupWorkers(spares=0)] if kind == "backup" else []
        return tfdist.ParameterServerStrategy(num_workers=2, num_ps=1, policies=policies)
    return None


def _use(strategy: Any) -> None:
    """Makes `strategy` the one of tests that split devices and make their own."""
    if strategy is not None:
        context._reset_context = lambda: None
        tf.config.set_logical_device_configuration = lambda *_, **__: None
        tf.distribute.MirroredStrategy = lambda *_, **__: strategy


def _is_called_by_test() -> bool:
    """Returns True if the caller of the function that calls this is a test file of Keras'."""
    return sys._getframe(2).f_code.co_filename.endswith("_test.py")


def _line(report: Any) -> str:
    with contextlib.suppress(AttributeError):
        return " ".join(report.longrepr.reprcrash.message.split())[:300]
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:300]
    return str(report.longrepr).strip().split("\n")[-1][:300]
