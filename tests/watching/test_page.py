# SPDX-License-Identifier: Apache-2.0
"""The page in a real TensorBoard and a real browser shows the numbers of the log, by mouse and by keyboard."""

from __future__ import annotations

import json
import pathlib
import re
import urllib.request
from collections.abc import Iterator

import browser
import cluster_log
import numpy as np
import pytest

from tfdist.telemetry.update_log import Outcome, read_logs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.NO_CHROMIUM),
]
HOSTILE = "<img src=x onerror=document.title='hit'>"
# By task: bytes sent and received per second, at seconds 60, 120 and 180.
BYTES = {
    "chief:0": ([4e3, 5e3, 6e3], [1e3, 1e3, 2e3]),
    "ps:0": ([9e3, 8e3, 9e3], [7e3, 6e3, 5e3]),
    "worker:0": ([2e3, 2e3, 2e3], [3e3, 3e3, 3e3]),
    "worker:3": ([500.0, 0.0, 800.0], [100.0, 200.0, 300.0]),
}
SCALARS = [
    (f"{direction}/{task}", 50 * number, rate, 60.0 * (number + 1))
    for task, pair in BYTES.items()
    for direction, rates in zip(("sent", "received"), pair, strict=True)
    for number, rate in enumerate(rates)
] + [(f"loss/{run}", 50 * number, 1 / number, 60.0 * number) for run in ("train", "validation") for number in (1, 2)]
# Height of the time axis and the labels of events, above the lanes.
AXIS = 38
SHOWN = "document.querySelector('main').dataset.state === 'ready'"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("logs")
    cluster_log.write(directory / HOSTILE / "updates", workers=2, updates=30, job=HOSTILE, origin_secs=1.6e9)
    cluster_log.write(directory / "run1" / "policy" / "updates", workers=4, updates=2000, scalars=SCALARS)
    damaged = directory / "run1" / "policy" / "updates" / "0000000999.npz"
    damaged.write_bytes(b"half a file")
    return directory


@pytest.fixture(scope="module")
def server(logdir: pathlib.Path) -> Iterator[str]:
    with browser.tensorboard(logdir) as address:
        yield address


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Browser]:
    with browser.chromium() as opened:
        yield opened


@pytest.fixture
def page(window: browser.Browser, server: str) -> browser.Browser:
    window.errors.clear()
    window.open(f"{server}/data/plugin_entry.html?name=tfdist")
    window.wait_for(SHOWN)
    return window


def place(page: browser.Browser, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
    box = page.value(
        f"(() => {{ const e = document.querySelector('{selector}'); e.scrollIntoView({{block: 'center'}}); "
        "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    return box[0] + x * box[2], box[1] + y * box[3]


def shown(page: browser.Browser) -> tuple[float, float]:
    """The window of time, once its data are drawn."""
    section = "document.querySelector('section[data-mode]').dataset"
    page.wait_for(f"document.querySelector('main').dataset.shown === {section}.begin + ' ' + {section}.end")
    begin, end = page.value(f"[{section}.begin, {section}.end]")
    return float(begin), float(end)


def details(page: browser.Browser) -> dict[str, str]:
    return page.value(
        "Object.fromEntries([...document.querySelectorAll('#details dd')].map(e => [e.dataset.name, e.textContent]))"
    )


def test_page_and_log_have_the_same_numbers(page, logdir):
    total = read_logs(logdir / "run1").total()
    assert "2,000 updates" in page.value("document.querySelector('#facts').textContent")
    rows = page.value(
        "[...document.querySelectorAll('#workers tbody tr')].map(r => [+r.dataset.worker, "
        "...['accepted', 'dropped', 'lost'].map(k => +r.querySelector(`[data-key=${k}]`).dataset.value)])"
    )
    assert rows[0][0] == 3
    expected = [[w, *(int(getattr(total, n)[0, w]) for n in ("accepted", "dropped", "lost"))] for w in range(4)]
    assert sorted(rows) == expected
    # A heading sorts.
    page.click(*place(page, "th[data-key=dropped] button"))
    order = page.value("[...document.querySelectorAll('#workers tbody tr')].map(r => +r.dataset.worker)")
    assert order == sorted(range(4), key=lambda worker: -expected[worker][2])
    assert page.value("document.querySelector('th[data-key=dropped]').getAttribute('aria-sort')") == "descending"


def test_page_says_who_is_slow_and_shows_it_first(page):
    words = page.value("document.querySelector('#in-words').textContent")
    assert words.startswith("worker:3 is 1.") and words.endswith("of its gradients are dropped")
    marked = page.value("[...document.querySelectorAll('#workers tbody tr')].map(r => r.className)")
    assert marked == ["slow", "", "", ""]
    # The lane of the slow worker is the first one.
    x, y = place(page, "#lanes", 0.6, 0.0)
    page.click(x, y + AXIS + 13)
    assert details(page)["worker"] == "worker:3"


def test_losses_are_drawn_with_the_events_of_the_training(page):
    page.wait_for("document.querySelectorAll('#loss > svg path').length === 2")
    names = page.value("[...document.querySelectorAll('#loss > svg path')].map(p => p.dataset.name)")
    assert names == ["train", "validation"]
    assert page.value("document.querySelectorAll('#loss > svg circle').length") == 4
    # Two events, so near that one label fits.
    assert page.value("document.querySelectorAll('#loss > svg .event').length") == 2
    assert page.value("[...document.querySelectorAll('#speed svg .label')].map(e => e.textContent)") == ["lost"]


def test_advice_is_a_line_and_a_table_of_replays(page):
    page.wait_for("document.querySelector('#advice').dataset.state === 'ready'")
    best = page.value("document.querySelector('#advice .words').textContent")
    assert best.startswith(("Set BackupWorkers(spares=0): ", "Keep 4 workers and BackupWorkers(spares=1): "))
    rows = page.value(
        "[...document.querySelectorAll('#advice tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows[0][:3] == ["as it ran", "4", ""] and {row[1] for row in rows} >= {"1", "4"}


def test_bytes_of_the_log_are_drawn(page):
    page.wait_for(f"+document.querySelector('#bytes').dataset.series === {2 * len(BYTES)}")
    drawn = page.value(
        "Object.fromEntries([...document.querySelectorAll('#bytes > svg path')].map(p => [p.dataset.name, "
        "p.getAttribute('d')]))"
    )
    legend = page.value("[...document.querySelectorAll('#bytes .legend li')].map(e => e.textContent)")
    kinds = ("sent", "received")
    lines = {f"{task} {kind}": rates for task, of in BYTES.items() for kind, rates in zip(kinds, of, strict=True)}
    assert set(legend) == set(drawn) == set(lines)
    for name, rates in lines.items():
        places = re.findall(r"[ML]([\d.]+),([\d.]+)", drawn[name])
        # The highest line is drawn at 1 / 1.05 of the height of 124 above the axis at 146.
        values = [(146 - float(y)) / 124 * 1.05 * 9e3 for _, y in places]
        assert values == pytest.approx(rates, abs=10)
    # A colour for each task by its kind, and a dash for each direction.
    styles = page.value(
        "Object.fromEntries([...document.querySelectorAll('#bytes > svg path')].map(p => [p.dataset.name, "
        "p.getAttribute('class')]))"
    )
    assert styles["chief:0 sent"] == "line c6 sent" and styles["ps:0 received"] == "line c4 received"
    assert styles["worker:3 sent"] == "line c2 sent"
    assert "mean since the point before" in page.value("document.querySelector('#bytes-note').textContent")
    # Between two points a line goes on.
    page.click(*place(page, "#zoom-in"))
    for _ in range(9):
        page.click(*place(page, "#zoom-in"))
    shown(page)
    zoomed = page.value("[...document.querySelectorAll('#bytes > svg path')].map(p => p.getAttribute('d'))")
    assert all(re.fullmatch(r"M[\d.]+,[\d.]+L[\d.]+,[\d.]+", each) for each in zoomed), zoomed


def test_zoom_to_single_gradients_and_click_on_a_lane_show_the_log(page, logdir):
    begin, end = shown(page)
    for _ in range(5):
        page.click(*place(page, "#zoom-in"))
        shown(page)
    low, high = shown(page)
    assert high - low == pytest.approx((end - begin) / 32, rel=1e-6)
    assert page.value("document.querySelector('section[data-mode]').dataset.mode") == "gradients"
    x, y = place(page, "#lanes", 0.6, 0.0)
    page.click(x, y + AXIS + 13)
    found = details(page)
    timeline = read_logs(logdir / "run1")
    made = np.repeat(timeline.updates.time, timeline.updates.count) + timeline.contributions.arrival
    inside = (made >= low) & (made < high) & (timeline.contributions.worker == 3)
    outcomes = timeline.contributions.outcome[inside]
    assert found["worker"] == "worker:3"
    assert found["accepted"] == str((outcomes == Outcome.ACCEPTED).sum())
    assert found["late and dropped"] == str((outcomes == Outcome.DROPPED).sum())
    # The pointer over a gradient: what it did, and for how long.
    page.mouse("mouseMoved", x, y + AXIS + 13)
    tip = page.value("document.querySelector('#tip').innerText")
    assert "worker:3 at" in tip
    assert "doing: " in tip


def test_wheel_drag_and_keys_zoom_and_pan(page):
    begin, end = shown(page)
    x, y = place(page, "#lanes", 0.5, 0.5)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    page.wait_for(f"+document.querySelector('section[data-mode]').dataset.end < {end}")
    low, high = shown(page)
    assert high - low < 0.5 * (end - begin)
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x + 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x + 100, y, button="left", clickCount=1)
    earlier = shown(page)
    assert earlier[0] < low
    assert earlier[1] - earlier[0] == pytest.approx(high - low)
    page.value("document.querySelector('#lanes').focus()")
    page.key("+")
    closer = shown(page)
    assert closer[1] - closer[0] == pytest.approx((high - low) / 2)
    page.key("ArrowRight")
    assert shown(page)[0] > closer[0]
    page.key("ArrowDown")
    page.key("ArrowDown")
    assert details(page)["worker"] == "worker:0"
    assert "worker: worker:0" in page.value("document.querySelector('[aria-live=polite]').textContent")
    page.key("0")
    assert shown(page) == (begin, end)


def test_every_control_is_reached_by_the_tab_key_with_a_visible_focus(page):
    page.value("document.activeElement.blur()")
    reached = []
    for _ in range(12):
        page.key("Tab")
        reached.append(page.value("document.activeElement.id"))
        assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert [each for each in reached if each][:7] == ["job", "zoom-in", "zoom-out", "left", "right", "fit", "lanes"]


def test_hostile_names_are_shown_as_text_and_damaged_files_named(page):
    options = page.value("[...document.querySelectorAll('#job option')].map(o => o.textContent)")
    assert any(HOSTILE in option for option in options)
    page.value(
        "(() => { const s = document.querySelector('#job'); "
        "s.value = [...s.options].find(o => o.textContent.includes('onerror')).value; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    page.wait_for("document.querySelector('#facts').textContent.includes('30 updates')")
    # Of so few updates nothing can be said.
    page.wait_for("document.querySelector('#advice').dataset.state === 'none'")
    assert page.value("document.querySelector('.advice').hidden")
    assert page.value("document.images.length") == 0
    assert page.value("document.title") != "hit"
    assert "0000000999.npz" in page.value("document.querySelector('#notes').textContent")
    assert [each for each in page.errors if "favicon" not in each] == []


def test_tab_of_tensorboard_shows_the_page_in_its_theme(window, server):
    window.open(f"{server}/?darkMode=true#tfdist")
    frame = "document.querySelector('iframe').contentDocument"
    window.wait_for(f"{frame}.querySelector('main').dataset.state === 'ready'")
    theme = f"{frame}.documentElement.dataset.theme"
    dark = window.value("document.body.classList.contains('dark-mode')")
    assert window.value(theme) == ("dark" if dark else "light")
    window.value("document.body.classList.toggle('dark-mode')")
    window.wait_for(f"{theme} === '{'light' if dark else 'dark'}'")


def test_empty_log_directory_is_said_and_tensorboard_goes_on(window, tmp_path):
    with browser.tensorboard(tmp_path) as address:
        window.open(f"{address}/data/plugin_entry.html?name=tfdist")
        window.wait_for("document.querySelector('main').dataset.state === 'empty'")
        assert "There is no update log below" in window.value("document.querySelector('#message').textContent")
        with urllib.request.urlopen(f"{address}/data/plugins_listing", timeout=60) as answer:
            assert json.load(answer)["tfdist"]["enabled"] is False
