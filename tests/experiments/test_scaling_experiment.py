# SPDX-License-Identifier: Apache-2.0
"""The scaling experiment: rows beyond the calibration are predicted, and a table that can't be read is one line."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "scaling"
HEADER = "devices,devices_per_machine,model,parameters_millions,images_per_sec\n"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in ("table_model", "tables_io")})


def errors(scaling, rows, up_to, **assumptions):
    known = [row for row in rows if row.devices <= up_to]
    calibration = scaling.table_model.Calibration(known, scaling.table_model.Assumptions(**assumptions))
    others = [row for row in rows if row.devices > up_to and row.model in calibration.models]
    return {(row.model, row.devices): calibration.predict(row).predicted / row.images_per_sec - 1 for row in others}


@pytest.mark.parametrize(
    ("table", "up_to", "beyond", "within"),
    [
        ("tensorflow_p2", 8, 64, 0.10),
        ("tensorflow_p2_batch32", 8, 64, 0.10),
        ("tensorflow_dgx1", 4, 8, 0.10),
        ("mxnet_p2", 16, 256, 0.10),
    ],
)
def test_published_rows_beyond_the_calibration_are_predicted(scaling, table, up_to, beyond, within):
    rows = scaling.tables_io.read(FOLDER / "tables" / f"{table}.csv")
    found = errors(scaling, [row for row in rows if row.devices <= beyond], up_to)
    assert found and max(map(abs, found.values())) <= within, found


def made(scaling, per_machine, bandwidth, overlap, count=7):
    """Rows of a cluster that is exactly as the ring model says, with 64 images a step."""
    rows = []
    for model, parameters, single in (("ResNet-50", 25.6, 200.0), ("VGG16", 138.4, 120.0)):
        for devices in (2**power for power in range(count)):
            local = min(devices, per_machine)
            machines, size = devices / local, 4e6 * parameters
            secs = 64 / single + 2 * (local - 1) / local * size / 8e9
            secs += max(0.0, 2 * (machines - 1) / machines * size / bandwidth - overlap * 2 / 3 * 64 / single)
            rows.append(scaling.table_model.Row(devices, per_machine, model, parameters, 64 * devices / secs))
    return rows


def test_a_network_that_the_rows_don_t_show_is_given_by_a_flag(scaling):
    rows = [row for row in made(scaling, 8, 1.25e9, 0.75) if row.devices <= 16]
    found = errors(scaling, rows, 8, network=1.25e9, batch_per_device=64)
    assert max(map(abs, found.values())) < 0.15, found


def test_few_parameter_servers_lower_the_prediction(scaling):
    rows = [dataclasses.replace(row, batch_per_device=64) for row in made(scaling, 8, 1.25e9, 0.75)]
    calibration = scaling.table_model.Calibration(rows[:4], scaling.table_model.Assumptions(network=1.25e9))
    of = {n: calibration.predict(dataclasses.replace(rows[6], servers=n)).predicted for n in (0, 1, 4, 8)}
    assert of[1] < 0.8 * of[4] and of[4] < of[8] == of[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no column devices, devices_per_machine, model, parameters_millions, images_per_sec"),
        ("devices,model\n1,a\n", "no column devices_per_machine, parameters_millions, images_per_sec"),
        (HEADER, "no rows"),
        (HEADER + "1,8,a,25\n", "line 2: images_per_sec must be a number above 0. Received: ''"),
        (HEADER + "1,8,a,25,fast\n", "line 2: images_per_sec must be a number above 0. Received: 'fast'"),
        (HEADER + "1.5,8,a,25,10\n", "line 2: devices must be a whole number above 0. Received: '1.5'"),
        (HEADER + "1,0,a,25,10\n", "line 2: devices_per_machine must be a whole number above 0"),
        (HEADER + "1,8,,25,10\n", "line 2: model is empty"),
        (HEADER + "1,8,a,25,10\n\n1,8,a,25,11\n", "line 4: a second row of a with 1 devices"),
        (HEADER + "16,8,a,25,10\n", "no row of up to 8 devices to calibrate on"),
        (HEADER[:-1] + ",servers\n1,8,a,25,10,\n2,8,a,25,10,0\n", "line 3: servers must be a whole number above 0"),
        (HEADER + "1,8,a,nan,10\n", "parameters_millions must be a number above 0"),
    ],
)
def test_a_table_that_is_invalid_is_one_line(scaling, tmp_path, text, line):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(scaling.tables_io.TableError) as raised:
        rows = scaling.tables_io.read(path)
        scaling.tables_io.calibrated(rows, 8, path)
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_the_command_writes_published_and_predicted(tmp_path):
    output, picture = tmp_path / "out.json", tmp_path / "out.png"
    table = FOLDER / "tables" / "tensorflow_p2.csv"
    command = [sys.executable, str(FOLDER / "run.py"), f"--table={table}", "--calibrate_up_to=8"]
    done = subprocess.run(
        [*command, f"--json={output}", f"--plot={picture}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())
    assert len(rows) == 15 and {"devices", "model", "published", "predicted"} <= rows[0].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    failed = subprocess.run([*command, "--table=none.csv"], capture_output=True, text=True, timeout=120)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1
