# SPDX-License-Identifier: Apache-2.0
"""Makes .venv and installs tfdist into it: `python .ci/venv.py experiments,test`. Standard library only.

`python .ci/venv.py experiments,test oldest` makes .venv-oldest instead, of the versions in constraints-oldest.txt;
`newest` makes .venv-newest, of the newest versions that setup.py admits.

A second run with nothing changed returns at once: a stamp per set of extras remembers what the installation was made
from. A lock lets several makes run at the same time, and a half-made environment (Ctrl-C while pip runs) is completed
by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Which versions, by default those of constraints.txt.
VERSIONS = sys.argv[2] if len(sys.argv) > 2 else ""
SUFFIX = f"-{VERSIONS}" if VERSIONS else ""
VENV = ROOT / f".venv{SUFFIX}"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / f"constraints{SUFFIX}.txt"
INPUTS = (CONSTRAINTS, ROOT / "setup.py", ROOT / "pyproject.toml")
SUPPORTED = ((3, 11), (3, 14))


def main(extras: str) -> None:
    """Brings the environment to the state that `extras` (comma-separated) asks for."""
    with _locked(ROOT / f"{VENV.name}.lock"):
        stamp, wanted = VENV / f".installed-{extras.replace(',', '-')}", _fingerprint(extras)
        if stamp.exists() and stamp.read_text() == wanted and _usable():
            return
        if not _usable():
            _create()
        _install(extras)
        stamp.write_text(wanted)


def _fingerprint(extras: str) -> str:
    digest = hashlib.sha256(f"{extras} {ROOT}".encode())
    for path in INPUTS:
        # There are no constraints on the newest versions.
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def _usable() -> bool:
    """Returns True if the environment has a Python of a supported version, and pip."""
    check = f"import sys, pip; sys.exit(not {SUPPORTED[0]} <= sys.version_info[:2] < {SUPPORTED[1]})"
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", check], capture_output=True).returncode == 0


def _create() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not SUPPORTED[0] <= sys.version_info[:2] < SUPPORTED[1]:
        sys.exit(f"tfdist needs Python 3.11, 3.12 or 3.13; {sys.executable} is {version}. Try: make PYTHON=python3.11")
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        sys.exit(
            f"{sys.executable} can't make virtual environments: its ensurepip is missing. "
            f"On Debian and Ubuntu: apt install python{version}-venv; or choose another Python: make PYTHON=..."
        )
    print(f"tfdist: making {VENV.name} with Python {version}", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", VENV])


def _install(extras: str) -> None:
    print(f"tfdist: installing tfdist[{extras}] and TensorFlow into {VENV.name}; once, a few minutes", flush=True)
    # Where nobody watches, pip's progress bars are only noise.
    pip = [PYTHON, "-m", "pip", *([] if sys.stdout.isatty() else ["--quiet"]), "--disable-pip-version-check", "install"]
    versions = ["-c", CONSTRAINTS] if CONSTRAINTS.exists() else ["-U", "--upgrade-strategy", "eager"]
    _run([PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "-U", *versions, "pip"])
    _run([*pip, *versions, "-e", f"{ROOT}[{extras}]"])


def _run(command: list[str | pathlib.Path]) -> None:
    # The build backend warns of every editable installation; it is the one that we want.
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    if result.returncode:
        sys.exit(f"tfdist: failed with exit code {result.returncode}: {' '.join(map(str, command))}")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("tfdist: another make is preparing the environment; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
