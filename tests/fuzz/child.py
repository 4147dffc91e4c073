# SPDX-License-Identifier: Apache-2.0
"""Trains the models of some seeds on one device and under a strategy: `child.py STRATEGY SEED...`."""

from __future__ import annotations

import sys
from typing import Any

import fuzz_outcome
import keras
import tensorflow as tf

import tfdist


def strategy_of(name: str) -> tf.distribute.Strategy:
    """The strategy of this name; see `STRATEGIES` in `__main__`."""
    one_policy = [tfdist.BackupWorkers(spares=0)]
    if name == "multi":
        return tfdist.MultiWorkerMirroredStrategy()
    if name.startswith("ps-"):
        workers, servers = map(int, name.split("-")[1:])
        return tfdist.ParameterServerStrategy(num_workers=workers, num_ps=servers, policies=one_policy)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # A thread for each device, and one for Keras' step.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    return tfdist.MirroredStrategy(["CPU:0", "CPU:1"], policies=one_policy if name == "mirrored-policy" else [])


def main(name: str, seeds: list[int]) -> None:
    """Prints one line for each seed, up to the first that fails within TensorFlow."""
    keras.config.set_floatx("float64")
    strategy: Any = strategy_of(name)
    is_chief = name != "multi" or strategy.cluster_resolver.task_id == 0
    for seed in seeds:
        outcome = fuzz_outcome.outcome(seed, strategy)
        if is_chief:
            print(f"fuzz {name} seed {seed}: {outcome}", flush=True)
        if outcome.startswith("FAIL") and "Graph execution error" in outcome:
            # An aborted collective fails all that follow.
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2:]])
