# SPDX-License-Identifier: Apache-2.0
"""A two-tower recommender whose tables are in shards on two parameter servers.

python two_towers.py
tfdist launch local --num_workers=2 --num_ps=2 two_towers.py
"""

import keras
import numpy as np

import tfdist

USERS, ITEMS = 20_000, 10_000

# Each table of 1 MB and more is spread over the servers by rows, and a step sends only the rows that it touches.
strategy = tfdist.ParameterServerStrategy(
    num_ps=2,
    variable_partitioner=tfdist.ShardedTables(min_bytes=1 << 20),
    policies=[tfdist.LazyRows()],
)


def tower(name, size):
    ids = keras.Input([], dtype="int32", name=name)
    vector = keras.layers.Embedding(size, 32, name=f"{name}_table")(ids)
    return ids, keras.layers.Dense(16)(vector)


with strategy.scope():
    user, user_vector = tower("user", USERS)
    item, item_vector = tower("item", ITEMS)
    score = keras.layers.Dot(axes=1)([user_vector, item_vector])
    model = keras.Model({"user": user, "item": item}, keras.layers.Activation("sigmoid")(score))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])

rng = np.random.default_rng(0)
users, items = rng.integers(0, USERS, 1280), rng.integers(0, ITEMS, 1280)
liked = (users % 2 == items % 2).astype("float32")[:, None]
model.fit({"user": users, "item": items}, liked, batch_size=64, epochs=2, verbose=2)
print(strategy.report())
