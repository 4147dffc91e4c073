# SPDX-License-Identifier: Apache-2.0
"""Messages of TensorFlow at every start are not shown for each task; all that a user needs is."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tfdist import cli
from tfdist.launchers import environment
from tfdist.launchers.supervise.output import StartupNoise

NOISE = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795390331.153472   28695 port.cc:153] oneDNN custom operations are on. You may see slightly different
I0000 00:00:1795390331.446121   28695 cpu_feature_guard.cc:227] This TensorFlow binary is optimized
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate flags.
E0000 00:00:1795390352.686604   28695 cuda_platform.cc:52] failed call to cuInit: INTERNAL: UNKNOWN ERROR (303)
I0000 00:00:1795390353.158255   29993 coordination_service.h:529] /job:worker/replica:0/task:1 has connected
I0000 00:00:1795390353.158340   29993 coordination_service.cc:505] Example stragglers:
/job:worker/replica:0/task:0
I0000 00:00:1795397457.867261   26921 eager_service_impl.cc:355] SessionOptions: goo.gle/debugonly
W0000 00:00:1795530509.9  5024 local_rendezvous.cc:412] Local rendezvous is aborting with status: ABORTED: Cleanup -12
W0000 00:00:1795530524.2  5 destroy_tensor_handle_node.h:59] Ignoring an error encountered when deleting remote \
tensors handles: INVALID_ARGUMENT: Unable to find the relevant tensor
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling /tensorflow.eager
:UNKNOWN:Error received from peer  {grpc_message:"Unable to find the relevant tensor"}
E0000 00:00:1795595584.6 16526 coordination_service.cc:1005] Encountered another error while reporting to \
/job:worker/replica:0/task:1: UNAVAILABLE: failed to connect to all addresses
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling /tensorflow.Coord
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"failed to connect to all addresses"}
This is usually caused by an earlier error during execution. Check the logs of (a) this task, (b) the leader
E0000 00:00:1795554471.8  7768 context.cc:873] Failed to register function remotely due to failed to connect to all \
addresses; last error: UNKNOWN: ipv4:127.0.0.1:38023: Failed to connect to remote host: Connection refused
Additional GRPC error information from remote target /job:worker/replica:0/task:0 while calling /tensorflow.eager
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"failed to connect to all addresses; last error"}
This could happen if the remote target has been disconnected from the client.
""".splitlines()
SHOWN = """\
E0000 00:00:1795554471.8  7768 context.cc:873] Failed to register function remotely due to Invalid argument: no such
This could happen if the remote target has been disconnected from the client.
W0000 00:00:1795530509.9  5024 local_rendezvous.cc:412] Local rendezvous is aborting with status: OUT_OF_RANGE: End
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling /tensorflow.eager
W0000 00:00:1795390331.153472   28695 auto_shard.cc:1] a warning
E0000 00:00:1795390331.153472   28695 cuda_platform.cc:52] failed call to cuInit: CUDA_ERROR_NO_DEVICE (100)
I1122 23:31:00.153472 28695 train.py:10] a line of the program's own logging
/job:worker/replica:0/task:0
}
loss: 0.5
To enable the following instructions: read the manual
WARNING:tensorflow:5 out of the last 5 calls triggered retracing
Epoch 1/3
""".splitlines()


@pytest.mark.parametrize("size", [1, 2, 100])
def test_noise_goes_and_all_else_stays_in_whatever_pieces_it_comes(size: int):
    noise, lines = StartupNoise({}), [*NOISE, *SHOWN]
    parts = [noise.without(lines[start : start + size]) for start in range(0, len(lines), size)]
    assert [line for part in parts for line in part] == SHOWN


@pytest.mark.parametrize("name", ["TF_CPP_MIN_LOG_LEVEL", "TFDIST_SEND_TF_CPP_MIN_LOG_LEVEL"])
def test_level_0_shows_everything_and_others_no_information(name: str):
    assert StartupNoise({name: "0"}).without(NOISE) == NOISE
    assert StartupNoise({name: "2"}).without([*NOISE, *SHOWN]) == SHOWN


@pytest.mark.parametrize(
    ("chosen", "env", "level"),
    [
        (None, {}, "1"),
        (None, {"TF_CPP_MIN_LOG_LEVEL": "0"}, "0"),
        ("error", {"TF_CPP_MIN_LOG_LEVEL": "0"}, "2"),
        ("0", {}, "0"),
    ],
)
def test_the_flag_then_the_user_then_warnings_set_the_level(chosen, env, level):
    assert environment.tf_log_level_environment(chosen, env) == {"TF_CPP_MIN_LOG_LEVEL": level}


@pytest.mark.parametrize("platform", ["local", "ssh", "slurm", "kubernetes", "tpu"])
def test_wrong_tf_log_level_is_one_line_on_every_platform(platform: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["launch", platform, "--tf_log_level=loud", "train.py"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("tfdist: --tf_log_level must be one of ") and line.count("\n") == 1
    assert f"(see tfdist launch {platform} --help)" in line


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_tasks_that_import_tensorflow_show_what_they_print(tmp_path: pathlib.Path):
    script = tmp_path / "train.py"
    script.write_text("import tensorflow as tf; tf.config.list_logical_devices(); print('here')")
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command = [sys.executable, "-m", "tfdist", "launch", "local", "--num_workers=1", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["[worker:0] here"]
    # It builds no strategy.
    assert [line for line in done.stderr.splitlines() if "no task has joined the cluster" not in line] == []
