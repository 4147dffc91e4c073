# SPDX-License-Identifier: Apache-2.0
"""Profiles are read as they were written, and each invalid value is a line that names its key."""

from __future__ import annotations

import dataclasses
import json
import math

import profiles
import pytest

from tfdist.planning import profile
from tfdist.planning.profile import NoiseScale, Table

WHOLE = profiles.make(
    0.1,
    10_000_000,
    tables=(Table("embeddings", 1000, 64, 12.5),),
    noise_scale=NoiseScale(100.0, 50.0, 200.0),
    script="train.py",
    cores=2,
    cpu_secs=0.15,
    other_cores=0.5,
)


def test_a_profile_is_read_as_it_was_written():
    assert profile.from_json(WHOLE.to_json()) == WHOLE


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("batch_size", 0, "Profile(batch_size=...) must be an integer of at least 1. Received: 0"),
        ("steps", [], "no step was measured"),
        ("dense_bytes", -1, "Profile(dense_bytes=...) must be an integer of at least 0. Received: -1"),
        ("steps", 3, ""),
        ("steps", [{"batch_size": 8, "secs": [0.1, math.nan]}], "MeasuredSteps(secs=...) must be numbers above 0. "),
        ("steps", [{"batch_size": 8}], "'secs'"),
        ("fit_secs", ["0.1"], "Profile(fit_secs=...) must be numbers above 0. Received: ('0.1',)"),
        ("tables", [{"name": "t", "rows": 1, "row_bytes": 1, "rows_per_step": -1}], "Table(rows_per_step=...) must be"),
        ("noise_scale", 3, ""),
        (
            "noise_scale",
            {"value": -1, "low": 0, "high": 1},
            "NoiseScale(value=...) must be a number of at least 0. Received: -1",
        ),
        ("cpu_secs", "0.1", "Profile(cpu_secs=...) must be a number of at least 0. Received: '0.1'"),
        ("wheels", 4, "wheels"),
    ],
)
def test_an_invalid_value_is_one_line_that_names_it(key, value, named):
    given = {**json.loads(WHOLE.to_json()), key: value}
    with pytest.raises(ValueError, match=r"^my.json is no whole tfdist profile \(.*\); write one with") as raised:
        profile.from_json(json.dumps(given), "my.json")
    assert named in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ("[]", "is no whole tfdist profile"),
        ('{"format": "tfdist network"}', "format 'tfdist network', version None; this tfdist reads version 3"),
        ('{"format": "tfdist profile", "version": 1}', "version 1; this tfdist reads version 3.; write one with"),
    ],
)
def test_what_is_no_profile_of_this_version_is_one_line(text, reason):
    with pytest.raises(ValueError, match=reason):
        profile.from_json(text)


def test_a_profile_of_a_busy_machine_says_so():
    measured = profiles.make(0.1, 8, cores=2, cpu_secs=0.15, other_cores=1.7)
    measured = dataclasses.replace(measured, fit_secs=(0.1,) * 20)
    assert measured.used_cores == pytest.approx(1.5)
    assert measured.busy_in_words == "other programs used 1.7 of 2 cores: the profile is of a busy machine"
    assert dataclasses.replace(measured, other_cores=0.1).busy_in_words == ""
