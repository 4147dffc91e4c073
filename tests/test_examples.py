# SPDX-License-Identifier: Apache-2.0
"""The scripts in examples/: each runs as the launch line on its top says."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys

import programs
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(280)]

EXAMPLES = sorted((programs.ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((programs.ROOT / "examples" / "notebooks").glob("*.ipynb"))
# Those that train alone without a launcher, in one process one after the other.
ALONE = [path for path in EXAMPLES if "MultiWorkerMirroredStrategy()" in path.read_text() and path.stem != "resume"]
# One line of the output of each.
SHOWS = {
    "compression": r"sent [\d,]+ bytes",
    "custom_loop": r"epoch 3: loss 0\.",
    "digits_mirrored": r"accuracy: 0\.\d+",
    "digits_multi_worker": r"accuracy: 0\.\d+",
    "digits_parameter_server": r"accuracy: 0\.\d+",
    "diloco": r"Epoch 3/3",
    "gan": r"critic: \d",
    "mixed_precision": "computes in float16 and keeps float32",
    "own_transform": r"policies=\[SoftSync",
    "resume": "updates: 60",
    "straggler": r"worker:1 .*%",
    "text": r"accuracy: [01]\.\d+",
    "two_towers": r"ps:1 ",
}


def commands(path: pathlib.Path) -> list[str]:
    """The launch lines on top of an example."""
    docstring = path.read_text().split('"""')[1]
    return [line for line in docstring.splitlines()[1:] if line]


def test_each_example_is_short_and_says_how_to_launch_it() -> None:
    assert {path.stem for path in EXAMPLES} == set(SHOWS)
    listed = (programs.ROOT / "examples" / "README.md").read_text()
    for path in EXAMPLES:
        assert 20 <= len(path.read_text().splitlines()) <= 60, path.name
        assert f"({path.name})" in listed
        assert commands(path)
        assert all(line.endswith(f" {path.name}") for line in commands(path)), path.name


def test_synchronous_examples_train_alone(tmp_path: pathlib.Path) -> None:
    script = f"""
    import runpy
    for path in {[str(path) for path in ALONE]}:
        print("==", path, flush=True)
        runpy.run_path(path, run_name="__main__")
        keras.mixed_precision.set_dtype_policy("float32")
    print("== horovod.md", flush=True)
    import re
    page = open({str(programs.ROOT / "docs" / "coming_from" / "horovod.md")!r}).read()
    (after,) = re.findall('```python title="after"\\n(.*?)```', page, re.DOTALL)
    names = dict(keras=keras, x=X, y=Y)
    names["make_model"] = lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    exec(after, names)
    """
    with programs.running(script, tmp_path) as program:
        assert program.wait(250) == 0, program.output
        parts = re.split(r"^== (.*)$", program.output, flags=re.MULTILINE)[1:]
    shown = dict(zip(parts[::2], parts[1::2], strict=True))
    for path in ALONE:
        assert re.search(SHOWS[path.stem], shown[str(path)]), shown[str(path)]
    assert "Epoch 5/5" in shown["horovod.md"]
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    # A kernel of this Python, whichever kernels are installed.
    client = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute()


# Those that start processes of their own.
LAUNCHED = [pytest.param(path, line, id=line) for path in EXAMPLES for line in commands(path)]


@pytest.mark.parametrize(("path", "line"), LAUNCHED)
def test_example_runs_by_its_launch_line(path: pathlib.Path, line: str, tmp_path: pathlib.Path) -> None:
    words = shlex.split(line)
    head = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "tfdist"]
    command = [*head, *words[1:-1], str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=250)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert re.search(SHOWS[path.stem], output), output
