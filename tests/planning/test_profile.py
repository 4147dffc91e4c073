# SPDX-License-Identifier: Apache-2.0
"""Profiles are read as they were written, and each invalid value is a line that names its key."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import profiles
import pytest

from tfdist.planning import profile
from tfdist.planning.profile import NoiseScale, Table

WHOLE = profiles.make(
    0.1,
    10_000_000,
    tables=(Table("embeddings", 1000, 64, 12.5),),
    noise_scale=NoiseScale(100.0, 50.0, math.inf, 8),
    flops_per_example=1e9,
    script="train.py",
    cores=2,
    cpu_secs=0.15,
    other_cores=0.5,
    runnable=1.5,
    fastest_secs=(0.1, 0.2),
    fastest_worker="worker:1",
)


def test_a_profile_is_read_as_it_was_written():
    assert profile.from_json(WHOLE.to_json()) == WHOLE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 0),
        ("batch_size", True),
        ("batch_size", None),
        ("dense_bytes", -1),
        ("steps", 3),
        ("steps", [{"batch_size": 8, "secs": []}]),
        ("steps", [{"batch_size": 8, "secs": [0.1, math.nan]}]),
        ("steps", [{"batch_size": 8, "secs": [math.inf]}]),
        ("fit_secs", ["0.1"]),
        ("tables", [{"name": "t", "rows": 1, "row_bytes": 0, "rows_per_step": 1}]),
        ("tables", [{"name": "t", "rows": 1, "row_bytes": 1, "rows_per_step": -1}]),
        ("noise_scale", 3),
        ("noise_scale", {"value": -1, "low": 0, "high": 1, "batches": 3}),
        ("flops_per_example", "many"),
        ("cores", -1),
        ("cpu_secs", "0.1"),
        ("other_cores", -1),
        ("runnable", "many"),
    ],
)
def test_an_invalid_value_is_one_line_that_names_the_key(key, value):
    given = {**json.loads(WHOLE.to_json()), key: value}
    with pytest.raises(profile.ProfileError) as raised:
        profile.from_json(json.dumps(given), "my.json")
    assert re.match(r"my.json: (secs|value|row_bytes|rows_per_step|" + key + ") must be ", str(raised.value))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no profile of tfdist"),
        ('{"format": "tfdist network"}', "is no profile of tfdist"),
        ('{"format": "tfdist profile", "version": 2}', "is a profile of version 2, and this tfdist reads version 1"),
    ],
)
def test_what_is_no_profile_of_this_version_is_one_line(text, reason):
    with pytest.raises(profile.ProfileError, match=reason):
        profile.from_json(text)


def test_a_profile_without_any_step_is_refused():
    given = {**json.loads(WHOLE.to_json()), "steps": [], "fit_secs": []}
    with pytest.raises(profile.ProfileError, match="steps must be a list with at least one batch size"):
        profile.from_json(json.dumps(given))


@pytest.mark.parametrize(
    ("cpu_secs", "others", "runnable", "used", "is_busy"),
    [
        (0.15, 0.1, 3.0, 1.5, False),  # alone, whatever its own threads wait for each other
        (0.03, 1.7, 2.0, 2.0, True),  # two threads that have got a sixth of the cores
        (0.03, 1.7, 1.0, 1.0, True),  # one thread
        (0.01, 1.7, 0.1, 0.1, True),  # a step that sleeps
    ],
)
def test_cores_of_a_step_are_those_that_it_would_use_alone(cpu_secs, others, runnable, used, is_busy):
    measured = profiles.make(0.1, 8, cores=2, cpu_secs=cpu_secs, other_cores=others, runnable=runnable)
    measured = dataclasses.replace(measured, fit_secs=(0.1,) * 20)
    assert measured.used_cores == pytest.approx(used)
    words = "other programs used 1.7 of 2 cores: the profile is of a busy machine"
    assert measured.busy_in_words == (words if is_busy else "")
