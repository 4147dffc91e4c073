# SPDX-License-Identifier: Apache-2.0
"""The plugin's routes answer with the numbers of the log, whatever is in the log directory, and with nothing else."""

from __future__ import annotations

import itertools
import json
import pathlib
import subprocess
import sys
from typing import Any

import cluster_log
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.plugins import base_plugin
from werkzeug import exceptions, routing, test, wrappers

from tfdist.planning import replay
from tfdist.telemetry.update_log import Outcome, Timeline, read_logs
from tfdist.watching.tensorboard import level_of_detail, plugin

HOSTILE = ("<img src=x onerror=alert(1)>", "..%2f..%2fetc", "x" * 200, "Ünïcödé ☃ 訓練", "a'b\"c&d")


class Site:
    """The plugin's routes under a test client."""

    def __init__(self, logdir: pathlib.Path | str) -> None:
        self.plugin = plugin.TfdistPlugin(base_plugin.TBContext(logdir=str(logdir) if logdir else ""))
        apps = self.plugin.get_plugin_apps()
        self.routes = sorted(apps)
        rules = routing.Map([routing.Rule(path, endpoint=path) for path in apps])

        @wrappers.Request.application
        def serve(request: wrappers.Request) -> Any:
            try:
                return apps[rules.bind_to_environ(request.environ).match()[0]]
            except exceptions.HTTPException as error:
                return error

        self.client = test.Client(serve)

    def json(self, route: str, code: int = 200, **parameters: Any) -> Any:
        answer = self.client.get(route, query_string=parameters)
        assert answer.status_code == code, answer.text
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.content_type.startswith("application/json")
        return json.loads(answer.text)

    def window(self, **parameters: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        answer = self.client.get("/window", query_string=parameters)
        assert answer.status_code == 200, answer.text
        assert answer.content_type == "application/octet-stream"
        return cluster_log.unpacked(answer.data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("logs")
    cluster_log.write(directory / "run1" / "policy" / "updates", workers=4, updates=600)
    return directory


def test_routes_answer_with_the_numbers_of_the_log(run):
    site, timeline = Site(run), read_logs(run)
    (job,) = site.json("/jobs")["jobs"]
    assert (job["updates"], job["workers"]) == (600, list(timeline.workers))
    assert job["run"] == "run1"
    header, arrays = site.window(job=job["id"], begin=job["begin"], end=job["end"], buckets=100)
    total, cells = timeline.total(), dict(zip(header["channels"], arrays["cells"].sum(axis=1), strict=True))
    for name in ("accepted", "dropped", "lost", "staleness_sum"):
        assert cells[name].tolist() == getattr(total, name)[0].tolist()
    assert cells["lost"].tolist() == [0, 1, 0, 0]
    computed = cells["accepted_secs"] + cells["dropped_secs"] + cells["lost_secs"]
    np.testing.assert_allclose(computed, total.compute_secs[0], rtol=1e-4)
    np.testing.assert_allclose(cells["wait_secs"], total.wait_secs[0], rtol=1e-4)
    assert arrays["totals"].sum(axis=1)[0] == 600
    # Each gradient by itself.
    assert header["detail"]
    assert len(arrays["worker"]) == len(timeline.contributions)
    rows = site.json("/workers", job=job["id"])["rows"]
    assert rows[0]["name"] == "worker:3"
    assert {row["name"]: row["dropped"] for row in rows} == dict(
        zip(timeline.workers, total.dropped[0].tolist(), strict=True)
    )


@pytest.fixture(scope="module")
def timeline(run: pathlib.Path) -> Timeline:
    return read_logs(run)


def sums(timeline: Timeline, begin: float, end: float) -> np.ndarray:
    """Adds up a window, gradient by gradient."""
    found = np.zeros((len(level_of_detail.CHANNELS), len(timeline.workers)))
    made = np.repeat(timeline.updates.time, timeline.updates.count)
    idle: dict[int, float] = {}
    for place in np.argsort(made + timeline.contributions.start):
        time, row = made[place], timeline.contributions[place : place + 1]
        worker, start, arrival = row.worker.item(), time + row.start.item(), time + row.arrival.item()
        outcome = row.outcome.item()
        until = time if outcome == Outcome.ACCEPTED else arrival
        held = max(start - row.held.item(), idle.get(worker, -np.inf))
        for channel, low, high in ((outcome, start, arrival), (3, arrival, until), (4, held, start)):
            found[channel, worker] += max(0.0, min(high, end) - max(low, begin))
        idle[worker] = until
        if begin <= arrival < end:
            found[5 + outcome, worker] += 1
            found[8, worker] += row.staleness.item() * (outcome == Outcome.ACCEPTED)
    return found


@settings(max_examples=12)
@given(st.floats(0, 0.98), st.floats(0.01, 0.1), st.integers(1, 50))
def test_exact_window_equals_sum_over_gradients(timeline, low, length, buckets):
    span = timeline.span[1]
    found = level_of_detail.Levels(timeline).window(low * span, (low + length) * span, buckets)
    assert found.is_exact
    expected = sums(timeline, low * span, (low + length) * span)
    np.testing.assert_allclose(found.cells.sum(axis=1), expected, rtol=1e-3, atol=2e-4)


def test_interpolated_window_has_the_sums_of_the_exact_one(timeline, monkeypatch):
    levels = level_of_detail.Levels(timeline)
    exact = levels.window(*timeline.span, 30)
    monkeypatch.setattr(level_of_detail, "MAX_ROWS", 10)
    rough = levels.window(*timeline.span, 30)
    assert (exact.is_exact, rough.is_exact) == (True, False)
    counts = slice(5, None)
    np.testing.assert_allclose(rough.cells.sum(axis=1)[counts], exact.cells.sum(axis=1)[counts], rtol=1e-5)
    np.testing.assert_allclose(rough.cells.sum(axis=1)[:4], exact.cells.sum(axis=1)[:4], rtol=1e-3, atol=1e-3)
    # In a bucket they differ by what an update has at most.
    assert np.abs(rough.cells[5] - exact.cells[5]).max() <= 2
    assert rough.totals.sum(axis=1)[0] == pytest.approx(600)


def test_delays_are_those_of_the_last_gradient_of_each_update(timeline):
    delay, last = dict.fromkeys(range(4), 0.0), dict.fromkeys(range(4), 0)
    offsets = timeline.updates.offsets
    for begin, end in itertools.pairwise(offsets):
        rows = timeline.contributions[begin:end]
        rows = rows[rows.outcome == Outcome.ACCEPTED]
        order = np.argsort(rows.arrival)
        delay[rows.worker[order[-1]].item()] += (rows.arrival[order[-1]] - rows.arrival[order[-2]]).item()
        last[rows.worker[order[-1]].item()] += 1
    job = plugin.RecordedJob(timeline)
    rows, report = job.table, job.report
    assert {row["worker"]: row["last"] for row in rows} == last
    assert report.delay_secs == pytest.approx({f"worker:{worker}": secs for worker, secs in delay.items()}, rel=1e-4)
    # The first number of the table is that by which its rows are sorted, behind the slow ones.
    costs = [row["cost_secs"] for row in rows if not row["is_slow"]]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"job": "../../etc/passwd"},
        {"job": "ID"},
        {"job": "ID", "begin": "x", "end": "2", "buckets": "3"},
        {"job": "ID", "begin": "nan", "end": "2", "buckets": "3"},
        {"job": "ID", "begin": "2", "end": "2", "buckets": "3"},
        {"job": "ID", "begin": "0", "end": "inf", "buckets": "3"},
        {"job": "ID", "begin": "0", "end": "2", "buckets": "1e9"},
        {"job": "ID", "begin": "0", "end": "2", "buckets": "9" * 5000},
    ],
)
def test_bad_parameters_are_refused_in_one_line(run, parameters):
    site = Site(run)
    job = site.json("/jobs")["jobs"][0]["id"]
    given = {name: job if value == "ID" else value for name, value in parameters.items()}
    message = site.json("/window", code=400, **given)["error"]
    assert "\n" not in message


def test_site_serves_its_files_and_data_and_nothing_else(run):
    site = Site(run)
    assert [route for route in site.routes if "." not in route] == [
        "/advice",
        "/jobs",
        "/scalars",
        "/window",
        "/workers",
    ]
    assert site.client.get("/index.js").content_type.startswith("text/javascript")
    for path in ("/../plugin.py", "/%2e%2e/plugin.py", "/static/index.js", "/run1/policy/updates/log.json", "/"):
        assert site.client.get(path).status_code == 404


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_passed_on_as_data(tmp_path, name):
    directory = tmp_path / name.replace("/", "_") / "updates"
    cluster_log.write(directory, workers=2, updates=3, job=name)
    answer = Site(tmp_path).client.get("/jobs")
    (job,) = json.loads(answer.text)["jobs"]
    assert (job["job"], job["run"]) == (name, name)
    assert answer.content_type == "application/json"


def test_page_says_what_it_sees_in_empty_damaged_and_unfinished_directories(tmp_path):
    assert Site(tmp_path / "nowhere").json("/jobs")["jobs"] == []
    assert not Site(tmp_path).plugin.is_active()
    assert "start TensorBoard with --logdir" in Site("").json("/jobs", code=400)["error"]
    directory = tmp_path / "run" / "updates"
    cluster_log.write(directory, workers=2, updates=10)
    (segment,) = directory.glob("*.npz")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:100])
    site = Site(tmp_path)
    assert site.plugin.is_active()
    answer = site.json("/jobs")
    assert answer["skipped"][0]["path"] == f"run/updates/{segment.name}"
    (job,) = answer["jobs"]
    assert job["updates"] == 0
    for route in ("/workers", "/advice", "/scalars"):
        site.json(route, job=job["id"])
    header, _ = site.window(job=job["id"], begin=0, end=1, buckets=10)
    assert header["detail"]
    (directory / "log.json").write_text("{")
    assert Site(tmp_path).json("/jobs")["num_skipped"] == 1


def test_advice_of_the_page_is_that_of_the_replay(tmp_path):
    cluster_log.write(tmp_path / "updates", workers=4, updates=400, slow=4.0)
    site = Site(tmp_path)
    (job,) = site.json("/jobs")["jobs"]
    found, expected = site.json("/advice", job=job["id"]), replay.advise(read_logs(tmp_path))
    assert (found["state"], found["text"], found["measured"]) == ("ready", expected.text, expected.measured)
    assert [each["gradients"] for each in found["cases"]] == [each.gradients_per_sec for each in expected.cases]


def test_plugin_needs_no_tensorflow():
    program = (
        "import sys, types; sys.modules['tensorboard.compat.notf'] = types.ModuleType('notf')\n"
        "import tfdist.watching.tensorboard.plugin; print({'tensorflow', 'keras'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
