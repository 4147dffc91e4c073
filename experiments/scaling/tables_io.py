# SPDX-License-Identifier: Apache-2.0
"""Reads tables of published throughputs. Each error is one line with the file, the line and the remedy."""

from __future__ import annotations

import csv
import math
import pathlib

from table_model import Row

COLUMNS = ("devices", "devices_per_machine", "model", "parameters_millions", "images_per_sec")
# Facts that a table may state; an empty cell is unknown.
OPTIONAL = ("batch_per_device", "servers", "network_gbits")


class TableError(ValueError):
    """A table that can't be read. The message is one line."""


def read(path: pathlib.Path) -> list[Row]:
    """Reads a CSV file with the columns `COLUMNS`, and perhaps `OPTIONAL`, in any order. Lines with # are comments.

    Raises:
      TableError: the file, a column or a value is missing or invalid, or two rows are of the same model and devices.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: can't be read: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and line[0] != "#"]
    reader = csv.DictReader([line for _, line in lines], skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = names
    if missing := [name for name in COLUMNS if name not in names]:
        raise TableError(f"{path}: no column {', '.join(missing)}; the columns are {', '.join(COLUMNS)}")
    rows: list[Row] = []
    for (number, _), values in zip(lines[1:], reader, strict=False):
        row = _row(values, f"{path}, line {number}")
        if any((each.model, each.devices) == (row.model, row.devices) for each in rows):
            raise TableError(f"{path}, line {number}: a second row of {row.model} with {row.devices} devices; keep one")
        rows.append(row)
    if not rows:
        raise TableError(f"{path}: no rows; a row is for example 8,8,ResNet-50,25.6,378")
    return rows


def calibrated(rows: list[Row], up_to: int, path: pathlib.Path) -> list[Row]:
    """Returns the rows to calibrate on.

    Raises:
      TableError: there are none.
    """
    known = [row for row in rows if row.devices <= up_to]
    if not known:
        raise TableError(f"{path}: no row of up to {up_to} devices to calibrate on; raise --calibrate_up_to")
    return known


def _row(values: dict[str, str | None], where: str) -> Row:
    text = {name: (values.get(name) or "").strip() for name in (*COLUMNS, *OPTIONAL)}
    if not text["model"]:
        raise TableError(f"{where}: model is empty; name the model")
    devices = _number(text["devices"], "devices", where, whole=True)
    local = _number(text["devices_per_machine"], "devices_per_machine", where, whole=True)
    parameters = _number(text["parameters_millions"], "parameters_millions", where)
    speed = _number(text["images_per_sec"], "images_per_sec", where)
    facts = {name: _number(text[name], name, where, whole=name != OPTIONAL[-1]) for name in OPTIONAL if text[name]}
    return Row(int(devices), int(local), text["model"], parameters, speed, **facts)


def _number(text: str, name: str, where: str, whole: bool = False) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0 and not (whole and number % 1)):
        raise TableError(f"{where}: {name} must be a {'whole ' if whole else ''}number above 0. Received: {text!r}")
    return number
