# SPDX-License-Identifier: Apache-2.0
"""Trains a recommender of tables, or a dense one of as many bytes; each step sleeps, as if an accelerator computed.

`tfdist profile` runs it on one device, `run.py` as all tasks of a cluster with parameter servers.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

import keras
import numpy as np
import recommender_data
import tensorflow as tf
from absl import app, flags

import tfdist

# Adds the sleeping layer, whose flags say for how long, and the flags of a run.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "scaling"))
import sleeping_steps

FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "sparse", ["sparse", "dense"], "Tables whose rows are looked up, or dense layers.")
flags.DEFINE_integer("rounds", 3, "How many epochs of --steps steps are measured.", lower_bound=1)
WIDTH = 64
# Units of the dense model: ids are hashed to HASHED inputs.
HASHED, HIDDEN = 512, (1600, 1984)
_EXAMPLES = 1 << 16


def sparse_model() -> keras.Model:
    """Users and items as rows of tables: 16 MB, of which a step of 64 visits reads about 100 kB."""
    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((), dtype="int64", name="item")
    recent = keras.Input((recommender_data.RECENT,), dtype="int64", name="recent")
    items = keras.layers.Embedding(recommender_data.ITEMS, WIDTH, name="items")
    # One lookup of a step in each table.
    seen = items(keras.ops.concatenate([item[:, None], recent], axis=1))
    vectors = [
        keras.layers.Embedding(recommender_data.USERS, WIDTH, name="users")(user),
        seen[:, 0],
        keras.ops.mean(seen[:, 1:], axis=1),
    ]
    hidden = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()(vectors))
    click = keras.layers.Dense(1)(hidden)
    return keras.Model({"user": user, "item": item, "recent": recent}, sleeping_steps.Sleep()(click))


def dense_model() -> keras.Model:
    """The same visits with hashed ids, in dense layers: each step reads and updates all of the 16 MB."""
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "item": keras.Input((), dtype="int64", name="item"),
        "recent": keras.Input((recommender_data.RECENT,), dtype="int64", name="recent"),
    }
    half = HASHED // 2
    of_items = keras.ops.concatenate([inputs["item"][:, None], inputs["recent"]], axis=1) % half
    hashed = [keras.ops.one_hot(inputs["user"] % half, half), keras.ops.mean(keras.ops.one_hot(of_items, half), axis=1)]
    outputs = keras.layers.Concatenate()(hashed)
    for units in HIDDEN:
        outputs = keras.layers.Dense(units, activation="relu")(outputs)
    return keras.Model(inputs, sleeping_steps.Sleep()(keras.layers.Dense(1)(outputs)))


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"recommender.py takes flags only. Received: {' '.join(argv[1:])}")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tfdist.ParameterServerStrategy(
        num_workers=FLAGS.workers,
        num_ps=2,
        # Kernels of the dense model are in shards, too, so that both servers have as many bytes.
        variable_partitioner=tfdist.ShardedTables(min_bytes=1 << 20),
        policies=[tfdist.LazyRows()],
        transfer="plain",
    )
    with strategy.scope():
        model = sparse_model() if FLAGS.model == "sparse" else dense_model()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(0.05), loss)
    features, clicks = recommender_data.visits(_EXAMPLES)
    data = tf.data.Dataset.from_tensor_slices((features, clicks)).batch(FLAGS.batch, drop_remainder=True).repeat()
    times, sent = sleeping_steps.Times(), []
    counting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: sent.append(_bytes(strategy)))
    # In the first epoch steps are traced and workers receive the data; it is not counted. An epoch ends when all its
    # updates are made.
    losses = model.fit(
        data, steps_per_epoch=FLAGS.steps, epochs=1 + FLAGS.rounds, verbose=0, callbacks=[times, counting]
    ).history["loss"]
    found = {
        "steps_per_sec": [FLAGS.steps / secs for secs in times.secs[1:]],
        "spans": times.spans[1:],
        "bytes_per_step": [(after - before) / FLAGS.steps for before, after in itertools.pairwise(sent)],
        "losses": [float(each) for each in losses],
        "model_bytes": int(4 * np.sum([np.prod(each.shape) for each in model.trainable_variables])),
    }
    cluster = tfdist.Cluster.from_environment()
    if FLAGS.output and (cluster is None or cluster.is_chief):
        pathlib.Path(FLAGS.output).write_text(json.dumps(found))


def _bytes(strategy: Any) -> int:
    """Bytes that all tasks have sent."""
    return sum(strategy.report().bytes_sent.values())


if __name__ == "__main__":
    app.run(main)
