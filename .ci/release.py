# SPDX-License-Identifier: Apache-2.0
"""Builds a release into dist/ and tries it: `make release`. Uploads nothing.

1. Builds the source distribution and the wheel; twine checks both.
2. For each Python that is admitted and found, makes an empty environment, installs the wheel there, and runs the
   README's quick start, alone and as two workers, and three examples, away from the checkout.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
VERSIONS = ("3.11", "3.12", "3.13")
EXAMPLES = ("custom_loop", "compression", "straggler")
_RUN_SECS = 600


def main() -> None:
    """Builds, checks, and tries."""
    wheel = build()
    found = {version: python for version in VERSIONS if (python := interpreter(version))}
    for version in VERSIONS:
        print(f"tfdist: Python {version}: {found.get(version, 'not found, and so not tried')}", flush=True)
    if not found:
        sys.exit("tfdist: no Python was found to try the wheel with")
    for version, python in found.items():
        with tempfile.TemporaryDirectory(prefix=f"tfdist-release-{version}-") as folder:
            try_wheel(wheel, python, pathlib.Path(folder))
        print(f"tfdist: Python {version}: quick start and examples have run", flush=True)
    print("tfdist: dist/ holds", ", ".join(sorted(path.name for path in DIST.iterdir())))


def build() -> pathlib.Path:
    """Builds dist/ anew and returns the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", DIST, ROOT])
    run([sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir()])
    (wheel,) = DIST.glob("*.whl")
    return wheel


def interpreter(version: str) -> str | None:
    """Returns a Python of this version that runs: from the PATH, or of pyenv."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    check = f"import sys, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for python in filter(None, candidates):
        if subprocess.run([python, "-c", check], capture_output=True).returncode == 0:
            return python
    return None


def try_wheel(wheel: pathlib.Path, python: str, folder: pathlib.Path) -> None:
    """Installs the wheel into an empty environment in `folder`, and runs the quick start and examples there."""
    run([python, "-m", "venv", folder / "venv"])
    own = folder / "venv" / "bin"
    run([own / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel])
    (quick_start,) = re.findall(
        r"^```python\n(import .*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (folder / "train.py").write_text(quick_start)
    commands = [[own / "python", "train.py"], [own / "tfdist", "launch", "local", "--num_workers=2", "train.py"]]
    for name in EXAMPLES:
        text = (ROOT / "examples" / f"{name}.py").read_text()
        (folder / f"{name}.py").write_text(text)
        line = text.split('"""')[1].splitlines()[-1].split()
        commands.append([own / line[0], *line[1:]])
    for command in commands:
        run(command, cwd=folder, is_quiet=True, PYTHONPATH="", TF_CPP_MIN_LOG_LEVEL="2")


def run(command: Sequence[str | pathlib.Path], cwd: pathlib.Path = ROOT, is_quiet: bool = False, **env: str) -> None:
    """Runs a command; ends the program with its output if it fails."""
    words = list(map(str, command))
    output = subprocess.PIPE if is_quiet else None
    try:
        done = subprocess.run(
            words, cwd=cwd, env={**os.environ, **env}, stdout=output, stderr=output, text=True, timeout=_RUN_SECS
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"tfdist: has not ended within {_RUN_SECS} s: {' '.join(words)}")
    if done.returncode:
        sys.exit(f"tfdist: failed with exit code {done.returncode}: {' '.join(words)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
