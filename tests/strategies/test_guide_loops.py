# SPDX-License-Identifier: Apache-2.0
"""Custom loops as guides write them give the numbers of one device, under two devices and under two workers."""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile

import guide_loops
import numpy as np
import pytest
import tensorflow as tf

import tfdist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import process_cluster

NAMES = [*guide_loops.LOOPS, *guide_loops.SAVING]
PROGRAM = f"""
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60)
import guide_loops
for name in [*guide_loops.LOOPS, *guide_loops.SAVING]:
    report(name, guide_loops.run(name, strategy, shared))
"""


@functools.cache
def on_one_device(name: str) -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        return guide_loops.run(name, tf.distribute.get_strategy(), pathlib.Path(directory))


@pytest.mark.devices
@pytest.mark.parametrize("name", NAMES)
def test_loop_under_mirrored_is_that_of_one_device(name: str, cpus: list[str], tmp_path: pathlib.Path):
    found = guide_loops.run(name, tfdist.MirroredStrategy(cpus[:2]), tmp_path)
    np.testing.assert_allclose(found, on_one_device(name), atol=1e-5)


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_loops_of_two_workers_are_those_of_one_device(tmp_path: pathlib.Path):
    for found in process_cluster.run(PROGRAM, tmp_path, timeout_secs=350):
        for name in NAMES:
            np.testing.assert_allclose(found[name], on_one_device(name), atol=1e-5, err_msg=name)
