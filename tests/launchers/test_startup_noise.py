# SPDX-License-Identifier: Apache-2.0
"""Messages of TensorFlow at every start are not shown for each task; all that a user needs is."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tfdist.launchers import environment
from tfdist.launchers.supervise.output import without_noise

NOISE = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795390331.153472   28695 port.cc:153] oneDNN custom operations are on. You may see slightly different
I0000 00:00:1795390331.446121   28695 cpu_feature_guard.cc:227] This TensorFlow binary is optimized
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate flags.
E0000 00:00:1795390352.686604   28695 cuda_platform.cc:52] failed call to cuInit: INTERNAL: UNKNOWN ERROR (303)
W0000 00:00:1795530509.9  5024 local_rendezvous.cc:412] Local rendezvous is aborting with status: ABORTED: Cleanup -12
W0000 00:00:1795999619.872398   10928 op_kernel.cc:1845] UNKNOWN: ConnectionError: a sum will never come, as some
W0000 00:00:1795999784.932162   18096 preemption_notifier.cc:90] SIGTERM caught at 2026-11-30T00:49:44.932159622+00:00
E0000 00:00:1795845181.86 28047 base_collective_executor.cc:252] BaseCollectiveExecutor::StartAbort ABORTED: worker:1 en
The error could be from a previous operation. Restart your program to reset. [type.googleapis.com/tensorflow.Derived
\t [[{{node CollectiveGatherV2}}]] [type.googleapis.com/tensorflow.DerivedStatus='']
E0000 00:00:1795845181.86 28047 ring_alg.cc:291] Aborting RingGather with ABORTED: Collective ops is aborted by: worker
""".splitlines()
SHOWN = """\
W0000 00:00:1795999619.872398   10928 op_kernel.cc:1845] UNKNOWN: ConnectionError: of the user's own map
E0000 00:00:1795554471.8  7768 context.cc:873] Failed to register function remotely due to Invalid argument: no such
W0000 00:00:1795530509.9  5024 local_rendezvous.cc:412] Local rendezvous is aborting with status: OUT_OF_RANGE: End
E0000 00:00:1795390331.153472   28695 cuda_platform.cc:52] failed call to cuInit: CUDA_ERROR_NO_DEVICE (100)
\t [[{{node Equal}}]] [Op:__inference_train_7]
I1122 23:31:00.153472 28695 train.py:10] a line of the program's own logging
loss: 0.5
To enable the following instructions: read the manual
WARNING:tensorflow:5 out of the last 5 calls triggered retracing
""".splitlines()


def test_noise_goes_and_all_else_stays():
    assert without_noise([*NOISE, *SHOWN], {"TF_CPP_MIN_LOG_LEVEL": "2"}) == SHOWN
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TFDIST_SEND_TF_CPP_MIN_LOG_LEVEL"):
        assert without_noise(NOISE, {name: "0"}) == NOISE


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
