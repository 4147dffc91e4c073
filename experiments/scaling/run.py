# SPDX-License-Identifier: Apache-2.0
"""Predicts the last rows of published tables of throughput from the first ones.

python run.py --table=tables/tensorflow_p2.csv --calibrate_up_to=8 --json=out.json    # one table
python run.py                                                                         # all of tables/
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import cluster_runs
from absl import app, flags
from table_model import Assumptions, Calibration, Row
from tables_io import TableError, calibrated, read

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent

flags.DEFINE_string(
    "table",
    None,
    "CSV file with " + "devices, devices_per_machine, model, parameters_millions, "
    "images_per_sec, and perhaps batch_per_device, servers, network_gbits; all of tables/ by default.",
)
flags.DEFINE_integer("calibrate_up_to", 8, "Devices of the last row that is calibrated on.", lower_bound=1)
flags.DEFINE_string("json", None, "Where the list of rows goes, as {devices, model, published, predicted, ...}.")
flags.DEFINE_string("plot", None, "Where the plot goes; by default results/ beside this file.")
flags.DEFINE_float(
    "network_gbits",
    0.0,
    "What a machine's link carries, in Gbit/s; 0 for up to what the table states, or else the slowest usual link "
    "that the backward pass hides for the median model.",
    lower_bound=0.0,
)
flags.DEFINE_float("overlap", 0.75, "Share of the backward pass that hides sums between machines.", 0.0, 1.0)
flags.DEFINE_float(
    "batch_per_device", 0.0, "Examples of a device in each step; 0 for the table's, or else about 64.", lower_bound=0.0
)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    if not FLAGS.table and (FLAGS.json or FLAGS.plot):
        raise app.UsageError("--json and --plot are of one table; give --table, too")
    paths = [pathlib.Path(FLAGS.table)] if FLAGS.table else sorted((HERE / "tables").glob("*.csv"))
    try:
        for path in paths:
            _show(path, _predict(read(path), path))
    except TableError as error:
        sys.exit(f"run.py: {error}")
    except OSError as error:
        sys.exit(f"run.py: can't write the results: {error}")


def _predict(rows: list[Row], path: pathlib.Path) -> list[dict[str, Any]]:
    limit = FLAGS.calibrate_up_to
    known = calibrated(rows, limit, path)
    assumptions = Assumptions(FLAGS.batch_per_device, FLAGS.network_gbits * 0.125e9, FLAGS.overlap)
    calibration = Calibration(known, assumptions)
    for model in sorted({row.model for row in rows} - set(calibration.models)):
        print(f"run.py: {path}: no row of {model} has up to {limit} devices; it is left out", file=sys.stderr)
    has_seen = any(row.devices > row.devices_per_machine for row in known)
    source = "flag" if FLAGS.network_gbits else "stated" if any(row.network_gbits for row in known) else "assumed"
    print(
        f"{path.name}: calibrated on {len(known)} rows of up to {limit} devices; links between machines: "
        f"{calibration.network / 0.125e9:g} Gbit/s {source}" + (", then fitted" if has_seen else ", not seen in them")
    )
    results = []
    for row in rows:
        if row.model in calibration.models:
            found = calibration.predict(row)
            error = found.predicted / row.images_per_sec - 1
            results.append(
                {
                    "devices": row.devices,
                    "model": row.model,
                    "published": row.images_per_sec,
                    "predicted": found.predicted,
                    "low": found.low,
                    "high": found.high,
                    "calibrated": row.devices <= limit,
                    "error": error,
                }
            )
    return results


def _show(path: pathlib.Path, results: list[dict[str, Any]]) -> None:
    print(f"{'model':14} {'devices':>7} {'published':>11} {'predicted':>11} {'90 % interval':>21} {'error':>7}")
    for row in sorted(results, key=lambda row: (row["model"], row["devices"])):
        interval = f"{row['low']:.1f} to {row['high']:.1f}"
        mark = " calibrated" if row["calibrated"] else ""
        print(
            f"{row['model']:14} {row['devices']:7} {row['published']:11.1f} {row['predicted']:11.1f} {interval:>21} "
            f"{row['error']:+7.1%}{mark}"
        )
    if FLAGS.json:
        cluster_runs.write(pathlib.Path(FLAGS.json), results)
    import scaling_chart

    picture = pathlib.Path(FLAGS.plot) if FLAGS.plot else HERE / "results" / f"{path.stem}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    scaling_chart.save(
        picture, f"{path.stem}, calibrated on up to {FLAGS.calibrate_up_to} devices", results, FLAGS.calibrate_up_to
    )
    print(f"plot: {picture}\n")


if __name__ == "__main__":
    app.run(main)
