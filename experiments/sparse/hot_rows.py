# SPDX-License-Identifier: Apache-2.0
"""Savings of a cache of hot rows on a worker: rows found in it, bytes and time of a step, by staleness.

python hot_rows.py            # hit rates of ids from Zipf laws, 1 million rows
python hot_rows.py --measure  # besides, lookups of the real strategy (a worker, two servers), for what a row costs

A step asks for each of its ids once. A cached row is used until it is `staleness` steps of this worker old; then it is
fetched again. The cache has room for 1 % of the rows: those that are asked for most often, as if it knew them
beforehand. Gradients are sent whatever the cache has.
"""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import numpy as np
import recommender_data
from absl import app, flags

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent
flags.DEFINE_bool("measure", False, "Measures lookups, too.")
flags.DEFINE_string("output", str(HERE / "results" / "hot_rows.json"), "Where the figures go.")
ROWS, WIDTH, STEPS, ROOM = 1_000_000, 64, 400, 0.01
EXPONENTS, STALENESS = (1.05, 1.1, 1.2), (1, 4, 16, 64)
# Ids of a step: of the recommender here, and of 512 examples with 26 ids each, as in Criteo's logs.
IDS = (64 * 9, 512 * 26)
_ID_BYTES = 8
_SIZES = (256, 1024, 4096, 16384)


def hits(ids: np.ndarray, staleness: int, room: int) -> tuple[float, float]:
    """Returns different ids of a step, and the share of them that the cache has.

    Args:
      ids: int64 [steps, ids of a step].
      staleness: steps after which a cached row is fetched again.
      room: rows that the cache has room for.
    """
    fetched = np.full(ROWS, -(10**9))
    is_hot = np.zeros(ROWS, bool)
    is_hot[np.argsort(-np.bincount(ids.ravel(), minlength=ROWS))[:room]] = True
    asked = found = steps = 0
    for step, batch in enumerate(ids):
        unique = np.unique(batch)
        is_hit = is_hot[unique] & (step - fetched[unique] <= staleness)
        fetched[unique[~is_hit]] = step
        if step >= staleness:
            asked, found, steps = asked + len(unique), found + int(is_hit.sum()), steps + 1
    return asked / steps, found / asked


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"hot_rows.py takes flags only. Received: {' '.join(argv[1:])}")
    row_bytes = 4 * WIDTH
    measured = lookup_secs() if FLAGS.measure else {}
    found: dict[str, Any] = {"lookup_secs": measured, "rows": []}
    sizes, secs = list(map(int, measured)), list(measured.values())
    row_secs = float(np.polyfit(sizes, secs, 1)[0]) if measured else 0.0
    print("| Zipf | Ids of a step | Different | Staleness | In the cache | Bytes | Saved at 200 Mb/s | local |")
    print("|---|---|---|---|---|---|---|---|")
    for exponent in EXPONENTS:
        for count in IDS:
            ids = recommender_data.zipf(np.random.default_rng(0), ROWS, (STEPS, count), exponent)
            for staleness in STALENESS:
                different, share = hits(ids, staleness, int(ROOM * ROWS))
                # Ids, rows, and their gradients with ids.
                whole = different * (_ID_BYTES + row_bytes + row_bytes + _ID_BYTES)
                saved = share * different * (_ID_BYTES + row_bytes)
                entry = {"exponent": exponent, "ids": count, "different": different, "staleness": staleness}
                entry |= {"hits": share, "bytes": whole, "saved_bytes": saved}
                entry |= {"saved_secs_200": saved / 25e6, "saved_secs_local": share * different * row_secs}
                found["rows"].append(entry)
                local = f"{1e3 * entry['saved_secs_local']:.2f} ms" if measured else ""
                print(
                    f"| {exponent} | {count:,} | {different:,.0f} | {staleness} | {share:.0%} | "
                    f"-{saved / whole:.0%} | {1e3 * entry['saved_secs_200']:.1f} ms | {local} |"
                )
    if measured:
        print(f"lookups: {', '.join(f'{n} rows {1e3 * t:.2f} ms' for n, t in measured.items())}")
    output = pathlib.Path(FLAGS.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n")


def lookup_secs() -> dict[str, float]:
    """Returns the median seconds of a lookup on a worker, by number of different ids."""
    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.ParameterServerStrategy(
        num_workers=1, num_ps=2, variable_partitioner=tfdist.ShardedTables(), transfer="plain"
    )
    with strategy.scope():
        table = keras.layers.Embedding(ROWS, WIDTH)
        table.build()
    generator, found = np.random.default_rng(0), {}
    for size in _SIZES:
        ids = tf.constant(generator.choice(ROWS, size, replace=False))

        @tf.function
        def looked_up(ids: Any) -> Any:
            return tf.reduce_sum(tf.gather(table.embeddings, ids))

        secs = []
        for _ in range(60):
            start = time.perf_counter()
            strategy.run(looked_up, (ids,))
            secs.append(time.perf_counter() - start)
        found[str(size)] = float(np.median(secs[20:]))
    return found


if __name__ == "__main__":
    app.run(main)
