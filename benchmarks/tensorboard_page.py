# SPDX-License-Identifier: Apache-2.0
"""Measures the TensorBoard page: how long 64 workers x 100,000 updates take to be shown, and to be zoomed and panned.

    python benchmarks/tensorboard_page.py --workers=64 --updates=100000

TensorBoard is started anew for each opening called "cold": nothing was read yet when the browser asks for the page.
"Warm" is the same page again. An answer is the time from a zoom or a pan to the frame that shows all of its data.
Processor seconds are those of TensorBoard and the browser together; unlike the others they hardly depend on the load.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import psutil
from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import browser  # noqa: E402
import cluster_log  # noqa: E402

_WORKERS = flags.DEFINE_integer("workers", 64, "number of workers", lower_bound=2)
_UPDATES = flags.DEFINE_integer("updates", 100_000, "number of updates", lower_bound=100)
_REPEATS = flags.DEFINE_integer("repeats", 3, "how often the page is opened", lower_bound=1)
_LOGDIR = flags.DEFINE_string("logdir", None, "log of an earlier run of this script, to be read again")
_OUTPUT = flags.DEFINE_string("output", str(ROOT / "benchmarks/results/tensorboard_page.json"), "file of the results")

_SHOWN = "document.querySelector('main').dataset.state === 'ready'"
_DRAWN = (
    "(() => { const w = document.querySelector('section[data-mode]').dataset; "
    "return document.querySelector('main').dataset.shown === w.begin + ' ' + w.end; })()"
)
# The time of the page's own clock, from a key to the frame behind the one in which the new data were drawn.
_ANSWER = """new Promise(done => {
  const began = performance.now(), main = document.querySelector('main'), before = main.dataset.shown;
  document.querySelector('#lanes').dispatchEvent(new KeyboardEvent('keydown', {key: KEY, bubbles: true}));
  const look = () => {
    if (main.dataset.shown !== before && DRAWN) requestAnimationFrame(() => done(performance.now() - began));
    else setTimeout(look, 1);
  };
  look();
})"""
_KEYS = ["+"] * 6 + ["d", "a"] * 3 + ["+"] * 6 + ["d", "a"] * 3 + ["-"] * 12


def _opened(address: str, page: browser.Browser) -> tuple[float, float]:
    """Opens the page; returns the seconds, and those of the processors."""
    began, used = time.perf_counter(), _cpu_secs()
    page.open(f"{address}/data/plugin_entry.html?name=tfdist")
    page.wait_for(_SHOWN)
    return time.perf_counter() - began, _cpu_secs() - used


def _cpu_secs() -> float:
    """Adds up what TensorBoard and the browser have used."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            used += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return used


def _answers(page: browser.Browser) -> dict[str, list[float]]:
    # The simulation behind the advice shall not compete.
    page.wait_for("(document.querySelector('#advice').dataset.state || 'computing') !== 'computing'", 300)
    found: dict[str, list[float]] = {"zoom_secs": [], "pan_secs": [], "answer_cpu_secs": []}
    used = _cpu_secs()
    for key in _KEYS:
        millis = page.value(_ANSWER.replace("KEY", json.dumps(key)).replace("DRAWN", _DRAWN))
        found["zoom_secs" if key in "+-" else "pan_secs"].append(millis / 1000)
    found["answer_cpu_secs"].append((_cpu_secs() - used) / len(_KEYS))
    return found


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "max": max(values), "count": len(values)}


def main(argv: list[str]) -> None:
    del argv
    if browser.CHROMIUM is None:
        sys.exit(browser.NO_CHROMIUM)
    with tempfile.TemporaryDirectory() as temporary:
        logdir = pathlib.Path(_LOGDIR.value or temporary)
        if not any(logdir.iterdir()):
            cluster_log.write(
                logdir / "run" / "updates", _WORKERS.value, _UPDATES.value, spares=_WORKERS.value // 16 or 1
            )
        size = sum(path.stat().st_size for path in logdir.rglob("*.npz"))
        cold, warm, answers = [], [], {"zoom_secs": [], "pan_secs": [], "answer_cpu_secs": []}
        for _ in range(_REPEATS.value):
            with browser.tensorboard(logdir) as address, browser.chromium(1400, 1000) as page:
                cold.append(_opened(address, page))
                warm.append(_opened(address, page))
                for name, values in _answers(page).items():
                    answers[name] += values
    result = {
        "workers": _WORKERS.value,
        "updates": _UPDATES.value,
        "log_bytes": size,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "cold_secs": _summary([each[0] for each in cold]),
        "cold_cpu_secs": _summary([each[1] for each in cold]),
        "warm_secs": _summary([each[0] for each in warm]),
        "warm_cpu_secs": _summary([each[1] for each in warm]),
        **{name: _summary(values) for name, values in answers.items()},
    }
    text = json.dumps(result, indent=2) + "\n"
    pathlib.Path(_OUTPUT.value).write_text(text)
    print(text)


if __name__ == "__main__":
    app.run(main)
