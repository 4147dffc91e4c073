# SPDX-License-Identifier: Apache-2.0
"""That memory which was freed is used again. Each case is a process of its own: the setting is for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")

_PROGRAM = """
import ctypes, json, resource
from tfdist.engines import heap

def faults_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    libc.free(ctypes.memset(libc.malloc(SIZE), 1, SIZE))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 100 << 20
done = heap.keep_freed_memory()
print(json.dumps([done, faults_of_a_block(), faults_of_a_block()]))
"""


def _run(**environment: str) -> tuple[bool, int, int]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    output = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=inherited | environment, capture_output=True, check=True, timeout=60
    )
    return tuple(json.loads(output.stdout))


def test_a_large_block_comes_back_without_a_page_fault():
    done, first, second = _run()
    assert done
    # It is 25,600 pages of 4 KiB; those of the first time show that they are counted.
    assert first > 20
    assert second < first / 20


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_settings_of_the_environment_stand(environment):
    done, first, second = _run(**environment)
    assert not done
    assert second > first / 2
