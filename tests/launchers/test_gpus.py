# SPDX-License-Identifier: Apache-2.0
"""GPUs: an inherited choice is respected, nobody gets another's, and too few are an error."""

import os
import sys

import pytest

from tfdist.launchers import environment, local, requests
from tfdist.launchers.shape import Shape

SMI = """#!{python}
import sys
if sys.argv[1:] != ["--query-gpu=index,uuid", "--format=csv,noheader"]:
    sys.exit("unknown option")
for i in range(4):
    print(f"{{i}}, GPU-{{i}}aaaa-bbbb")
"""


@pytest.fixture
def four_gpus(tmp_path, monkeypatch):
    """An nvidia-smi that lists four GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("inherited", "devices"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("1,7,2", ["1"]),  # CUDA stops at the first that it does not know.
        ("-1", []),
        ("GPU-2aaaa", ["GPU-2aaaa"]),
        ("MIG-1/2/3", ["MIG-1/2/3"]),
    ],
)
def test_what_is_inherited_is_intersected_with_what_is_there(inherited, devices):
    assert environment.present({} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}) == devices


def test_without_a_driver_there_are_none(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment.present({}) == []


@pytest.mark.parametrize(
    ("devices", "tasks", "each", "shares"),
    [
        ("abcd", 2, None, [("a", "b"), ("c", "d")]),
        ("abcde", 2, None, [("a", "b"), ("c", "d")]),
        ("abcd", 2, 1, [("a",), ("b",)]),
        ("", 2, None, [(), ()]),
        ("ab", 2, 0, [(), ()]),
    ],
)
def test_shares(devices, tasks, each, shares):
    assert environment.divide_devices(devices, tasks, each) == shares


@pytest.mark.parametrize(
    ("devices", "tasks", "each", "words"),
    [
        ("a", 2, None, "2 workers need a GPU each, and there are fewer; use --num_workers=1, or --gpus_per_worker=0"),
        ("abc", 2, 2, "--gpus_per_worker=2 needs 4 GPUs for 2 workers; use fewer. Received: 3 GPUs on this machine"),
    ],
)
def test_more_gpus_asked_than_there_are(devices, tasks, each, words):
    with pytest.raises(requests.LaunchError) as caught:
        environment.divide_devices(devices, tasks, each)
    assert str(caught.value).startswith(words)


def visible(devices, **options):
    job = local.LocalJob(("train.py",), Shape(**options))
    request = local.plan(job, range(1, 1 + len(job.shape.members)), devices=devices)
    return {task.name: task.env.get("CUDA_VISIBLE_DEVICES") for task in request.tasks}


def test_only_those_who_compute_get_gpus():
    assert visible(["0", "1", "2", "3"], num_workers=2, num_ps=1, evaluator=True) == {
        "chief:0": "",
        "worker:0": "0,1",
        "worker:1": "2,3",
        "ps:0": "",
        "evaluator:0": "",
    }
    assert visible(["5", "7"], num_workers=1, chief=True) == {"chief:0": "5", "worker:0": "7"}
    assert visible([]) == {"worker:0": None, "worker:1": None}


@pytest.mark.usefixtures("four_gpus")
def test_the_launcher_shares_them_out(monkeypatch, capsys, tmp_path):
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert local.main(["--dry_run", str(tmp_path / "train.py")]) == 0
    out = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES=3 " in out and "CUDA_VISIBLE_DEVICES=1 " in out
