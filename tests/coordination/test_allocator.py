# SPDX-License-Identifier: Apache-2.0
"""Memory that was freed is used again. Each case is a process of its own: the setting is for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import tfdist
from tfdist import _machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")

_PROGRAM = """
import concurrent.futures, ctypes, json, resource
import tfdist

def faults_of_a_block(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    libc.free(ctypes.memset(libc.malloc(size), 1, size))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
done = tfdist.keep_freed_memory(few_arenas=True)
with concurrent.futures.ThreadPoolExecutor(1) as thread:
    small = list(thread.map(faults_of_a_block, [50 << 20] * 2))
large = list(map(faults_of_a_block, [100 << 20] * 2))
print(json.dumps([done, small, large]))
"""


def _output(program: str, *arguments: str, **environment: str) -> str:
    """Returns the output of a Python program, in an environment with no other settings of malloc than these."""
    settings = ("MALLOC_", "GLIBC_TUNABLES", "TF_CPU_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, env=inherited | environment, capture_output=True, check=True, timeout=60, text=True
    ).stdout


def _run(**environment: str) -> tuple[bool, list[int], list[int]]:
    """Returns True if it was done, and the page faults of using a block twice, in a thread and in the main thread."""
    return tuple(json.loads(_output(_PROGRAM, **environment)))


def test_a_large_block_comes_back_without_a_page_fault():
    done, *blocks = _run()
    assert done
    for first, second in blocks:
        # There are thousands of pages; those of the first time show that they are counted.
        assert first > 20
        assert second < first / 20


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_settings_of_the_environment_stand(environment):
    done, *blocks = _run(**environment)
    assert not done
    assert all(second > first / 2 for first, second in blocks)


_ARENAS = """
import ctypes, sys, threading
from tfdist import _machine
import tfdist

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
tfdist.keep_freed_memory(few_arenas=sys.argv[1] == "few")
ready = threading.Barrier(4 * _machine.usable_cpus())
def allocate():
    ready.wait()
    libc.malloc(10_000)
    ready.wait()
threads = [threading.Thread(target=allocate) for _ in range(ready.parties)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(_machine.usable_cpus(), flush=True)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.parametrize("few", ["few", "many"])
def test_threads_share_few_arenas_where_that_is_wanted(few):
    count, report = _output(_ARENAS, few).split("\n", 1)
    arenas = report.count("<heap nr=")
    assert arenas <= int(count) if few == "few" else arenas > int(count)


@pytest.mark.devices
def test_tensors_of_launched_processes_are_of_an_allocator_that_keeps_them():
    program = "import tensorflow as tf, tfdist; tfdist.MultiWorkerMirroredStrategy(); given = tf.ones([1000]); "
    program += "print(tf.config.experimental.get_memory_info('CPU:0')['peak'])"  # TensorFlow has none of `malloc`.
    assert int(_output(program, TFDIST_LAUNCHER="local")) >= 4000


@pytest.mark.devices
@pytest.mark.parametrize("strategy", ["MirroredStrategy", "MultiWorkerMirroredStrategy"])
def test_a_strategy_changes_the_allocator_of_launched_processes_only(strategy, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    monkeypatch.setattr(_machine, "keep_freed_memory", asked.append)
    getattr(tfdist, strategy)()
    assert asked == []
    monkeypatch.setenv("TFDIST_LAUNCHER", "local")
    getattr(tfdist, strategy)()
    assert asked == [strategy == "MultiWorkerMirroredStrategy"]
