# SPDX-License-Identifier: Apache-2.0
"""A process that only serves does without most of TensorFlow's Python, and with all that a server needs.

If one of these fails after an update of TensorFlow, `tfdist/compat/tensorflow/servers.py` is the file to change.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import programs
import pytest

from tfdist import Cluster, Task
from tfdist.serving import task

START = """
import sys
from tfdist import Cluster, Task
from tfdist.compat.tensorflow import servers
from tfdist.serving import task
from tfdist.launchers.supervise.processes import PortReservation
print("without", servers.skip_package_init())
with PortReservation(1) as reserved:
    task.start(Cluster({"worker": {0: f"127.0.0.1:{reserved.ports[0]}"}}, Task("worker", 0)))
print("modules", sum(name.startswith("tensorflow") for name in sys.modules))
"""


SKIPPED = "from tfdist.compat.tensorflow import servers\nservers.skip_package_init()\n"


def run(program: str, **env: str) -> list[str]:
    environment = {"PYTHONPATH": str(programs.ROOT), "PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3", **env}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.processes
def test_a_server_starts_without_most_of_tensorflow() -> None:
    without, modules = run(START)
    assert without == "without True"
    # `import tensorflow` makes more than 2000 of them.
    assert int(modules.split()[1]) < 300


CONFIG = """
import os
from tfdist import Cluster, Task
from tfdist.compat.tensorflow import servers
from tfdist.serving import task
servers.skip_package_init()
cluster = Cluster({"worker": {0: "a:1", 1: "a:2"}}, Task("worker", 0))
os.cpu_count, os.sched_getaffinity = lambda: 8, lambda pid: set(range(CPUS))
from tensorflow.python.training import server_lib
server_lib.Server = lambda *args, config, **kwargs: print(config.intra_op_parallelism_threads)
task.start(cluster)
"""


@pytest.mark.processes
def test_a_server_is_told_its_threads_unless_somebody_else_has_decided() -> None:
    all_cpus, half_of_them = CONFIG.replace("CPUS", "8"), CONFIG.replace("CPUS", "4")
    assert run(all_cpus) == ["4"]
    assert run(all_cpus, TF_NUM_INTRAOP_THREADS="3") == ["0"], "TensorFlow reads it itself"
    assert run(half_of_them) == ["0"], "bound to some of the CPUs, of which there is a thread each"


def of(*hosts: str) -> Cluster:
    workers = {index: f"{host}:{2000 + index}" for index, host in enumerate(hosts)}
    return Cluster({"chief": {0: "a:1"}, "worker": workers, "ps": {0: "a:1000"}}, Task("worker", 0))


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (of("a"), 8),
        (of("a", "b", "c"), 8),
        (of("a", "a", "b"), 4),
        (of("a", "a", "a"), 3),
        (of(*"a" * 20), 1),
        (of("localhost", "127.0.0.1"), 4),
        (of("a", "a").with_task(Task("ps", 0)), 4),
        (of("b", "b").with_task(Task("ps", 0)), 8),
    ],
)
def test_workers_of_one_host_share_its_cpus(cluster: Cluster, expected: int) -> None:
    assert task.threads_per_operation(cluster, num_cpus=8) == expected


@pytest.mark.processes
def test_codecs_do_without_the_front_door() -> None:
    (answer,) = run(
        SKIPPED + "from tfdist.compression import on_servers\nprint('imported', on_servers.CodecServer.__name__)"
    )
    assert answer == "imported CodecServer"


@pytest.mark.processes
def test_what_is_not_there_is_said_in_one_line() -> None:
    (answer,) = run(
        SKIPPED + "import tensorflow as tf\ntry: tf.constant(1)\nexcept AttributeError as error: print(error)"
    )
    assert answer == "this process only serves: it has imported no tensorflow.constant"


@pytest.mark.processes
def test_plugins_need_the_whole_import(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tensorflow-plugins").mkdir()
    program = "from tfdist.compat.tensorflow import servers\nprint(servers.skip_package_init())"
    assert run(program, PYTHONPATH=f"{programs.ROOT}:{tmp_path}") == ["False"]
    assert run(program, TF_PLUGGABLE_DEVICE_LIBRARY_PATH="/nowhere.so") == ["False"]


@pytest.mark.devices
def test_a_process_that_has_imported_tensorflow_keeps_it() -> None:
    import tensorflow as tf

    from tfdist.compat.tensorflow import servers

    assert not servers.skip_package_init()
    assert sys.modules["tensorflow"] is tf
