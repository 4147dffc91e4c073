# SPDX-License-Identifier: Apache-2.0
"""Takes the screenshots of docs/watching.md: trains, starts TensorBoard, and photographs the page in Chromium.

    make screenshots

Three real trainings write the logs with `tfdist.callbacks.Telemetry` (`--logdir` reads those of an earlier run again):
two workers without a policy, of which one reads slowly; four with backup workers, of which one is slow and one is
killed; and stale gradients. The picture of 64 workers is of a simulated cluster, and says so itself.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import browser  # noqa: E402
import cluster_log  # noqa: E402

_LOGDIR = flags.DEFINE_string("logdir", None, "directory of the logs; those that are there are not made again")
_ONLY = flags.DEFINE_list("only", None, "names of the pictures; all by default")
_OUTPUT = flags.DEFINE_string("output", str(ROOT / "docs/images"), "directory of the pictures")
_MAX_BYTES = 250_000
_SHOWN = "document.querySelector('main').dataset.state === 'ready'"
_ADVISED = "!['computing', undefined].includes(document.querySelector('#advice').dataset.state)"
# Name of the picture: training, theme, width, zooms, and which part of the page.
_PICTURES = {
    "tensorboard_synchronous": ("synchronous", False, 1280, 0, "main"),
    "tensorboard_backup_workers": ("backup_workers", False, 1280, 0, "main"),
    "tensorboard_gradients": ("backup_workers", False, 1280, 6, "section[data-mode]"),
    "tensorboard_staleness_dark": ("soft_sync", True, 1280, 0, "main"),
    "tensorboard_64_workers": ("simulated_64_workers", False, 1120, 0, "main"),
}


def _logs(logdir: pathlib.Path) -> None:
    """Makes the logs that are not there yet, each training in a process of its own."""
    for name in ("backup_workers", "soft_sync"):
        if not (logdir / name).exists():
            program = ROOT / "benchmarks" / "recorded_training.py"
            subprocess.run([sys.executable, str(program), f"--policy={name}", f"--logdir={logdir / name}"], check=True)
    if not (logdir / "synchronous").exists():
        program = [str(ROOT / "benchmarks" / "recorded_training.py"), "--policy=synchronous", "--steps=450"]
        launch = [sys.executable, "-m", "tfdist", "launch", "local", "--num_workers=2"]
        subprocess.run([*launch, *program, f"--logdir={logdir / 'synchronous'}"], check=True)
    if not (logdir / "simulated_64_workers").exists():
        cluster_log.write(logdir / "simulated_64_workers" / "policy" / "updates", 64, 20_000, spares=4, job="simulated")


def _choose(page: browser.Browser, training: str) -> None:
    page.value(
        "(() => { const s = document.querySelector('#job'); "
        f"s.value = [...s.options].find(o => o.textContent.startsWith({training!r})).value; "
        "s.dispatchEvent(new Event('change')); })()"
    )
    page.wait_for(f"document.querySelector('#job').selectedOptions[0].textContent.startsWith({training!r})")
    page.wait_for(_SHOWN)
    page.wait_for(f"document.querySelector('#facts').textContent.length && {_ADVISED}", 300)
    if not training.startswith("simulated"):
        page.wait_for("document.querySelector('#bytes').dataset.series > 0", 60)


def _photograph(address: str, name: str) -> pathlib.Path:
    training, is_dark, width, zooms, part = _PICTURES[name]
    with browser.chromium(width, 900, is_dark) as page:
        page.open(f"{address}/data/plugin_entry.html?name=tfdist")
        page.wait_for(_SHOWN)
        _choose(page, training)
        for _ in range(zooms):
            page.value("document.querySelector('#zoom-in').click()")
        if zooms:
            page.wait_for("document.querySelector('section[data-mode]').dataset.mode === 'gradients'")
        page.resize(width, page.value("document.documentElement.scrollHeight"))
        page.wait_for(
            "(() => { const w = document.querySelector('section[data-mode]').dataset; "
            "return document.querySelector('main').dataset.shown === w.begin + ' ' + w.end && w.buckets > 100; })()"
        )
        page.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        box = page.value(
            f"(() => {{ const b = document.querySelector('{part}').getBoundingClientRect(); "
            "return {x: Math.max(0, b.x - 12), y: Math.max(0, b.y - 8), "
            "width: b.width + 24, height: b.height + 16}; })()"
        )
        path = pathlib.Path(_OUTPUT.value) / f"{name}.png"
        page.screenshot(path, box)
    return path


def main(argv: list[str]) -> None:
    del argv
    if browser.CHROMIUM is None:
        sys.exit(browser.NO_CHROMIUM)
    pathlib.Path(_OUTPUT.value).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        logdir = pathlib.Path(_LOGDIR.value or temporary)
        logdir.mkdir(parents=True, exist_ok=True)
        _logs(logdir)
        with browser.tensorboard(logdir) as address:
            for name in _ONLY.value or _PICTURES:
                path = _photograph(address, name)
                size = path.stat().st_size
                print(f"{path}: {size:,} bytes")
                if size > _MAX_BYTES:
                    sys.exit(f"{path.name} has over {_MAX_BYTES:,} bytes; make it smaller")


if __name__ == "__main__":
    app.run(main)
