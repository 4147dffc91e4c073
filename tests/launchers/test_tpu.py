# SPDX-License-Identifier: Apache-2.0
"""The TPU launcher: chips and hosts, the commands of gcloud as text and run by a stand-in."""

import json
import os
import pathlib
import sys

import pytest

from tfdist.launchers import requests, tpu
from tfdist.launchers.supervise.output import LogSettings

GOLDEN = pathlib.Path(__file__).parent / "golden"
ODD = ["two words", 'it\'s "$HOME" `x`', "new\nline", "", "é"]


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        *(("v2-8", 1), ("v3-8", 1), ("v3-32", 4), ("v4-8", 1), ("v4-32", 4), ("v5p-16", 2), ("v5litepod-1", 1)),
        *(("v5litepod-8", 1), ("v5litepod-16", 4), ("v6e-256", 64), ("v99-512", 1)),
    ],
)
def test_hosts_of_a_type(name, hosts, capsys):
    assert job(accelerator_type=name, create=False).num_hosts == hosts
    assert job(accelerator_type="v6e-8").version == "v2-alpha-tpuv6e"
    assert ("is not known here: taken as one host" in capsys.readouterr().err) == name.startswith("v99")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zone": ""}, "--zone is missing; write it, such as --zone=us-central2-b. Received: nothing"),
        ({"accelerator_type": "v4"}, "--accelerator_type is not known; write one such as v2-8, v3-8, v4-8, v5p-8"),
        ({"accelerator_type": "v6e-16"}, "--version is no runtime for 4 hosts; use tpu-vm-tf-VERSION-pod-pjrt"),
    ],
)
def test_job_without_zone_or_runtime_is_refused(options, words):
    with pytest.raises(requests.LaunchError) as caught:
        job(**options)
    assert str(caught.value).startswith(words)


def job(**options):
    return tpu.TpuJob(**{"command": ("train.py", *ODD), "accelerator_type": "v4-8", "zone": "us-central2-b", **options})


def test_telemetry_is_refused_with_the_reason(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(
        requests.LaunchError, match="--telemetry measures workers of tfdist's strategies, and TPUs have"
    ):
        tpu.main(["--dry_run", "--accelerator_type=v4-8", "--zone=a", "--telemetry", str(script)])


def test_a_plan_as_text():
    request = tpu.plan(
        job(
            accelerator_type="v4-32",
            version="tpu-vm-tf-2.20.0-pod-pjrt",
            gcloud=("--network=mine",),
            copy=".",
            setup="pip install -r req.txt",
            spot=True,
            delete=True,
            env={"A": "b c"},
        )
    )
    assert str(request) == (GOLDEN / "tpu.sh").read_text()


FAKE = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + chr(10))
assert words[:3] == ["compute", "tpus", "tpu-vm"], words
flags = [word.partition("=")[0] for word in words[4:] if word.startswith("-")]
known = {{
    "create": ["--zone", "--project", "--accelerator-type", "--version", "--spot"],
    "scp": ["--recurse", "--zone", "--project", "--worker"],
    "ssh": ["--zone", "--project", "--worker", "--ssh-flag", "--command"],
    "delete": ["--zone", "--project", "--quiet"],
}}[words[3]]
for flag in flags:
    if flag not in known:
        sys.exit(f"ERROR: (gcloud.compute.tpus.tpu-vm.{{words[3]}}) unrecognized arguments: {{flag}}")
if words[3] == "create" and os.environ.get("NO_TPU"):
    sys.exit(os.environ["NO_TPU"])
for word in words:
    if word.startswith("--command="):
        sys.exit(subprocess.call(["sh", "-c", word.removeprefix("--command=")]))
"""


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """A gcloud that refuses what it does not know and runs commands here; gives the file that lists its calls."""
    log = tmp_path / "log"
    tool = tmp_path / "gcloud"
    tool.write_text(FAKE.format(python=sys.executable, log=str(log)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return log


@pytest.mark.processes
def test_the_script_gets_its_arguments_and_the_tpu_is_deleted_whatever_happens(gcloud, tmp_path, capfd):
    script = tmp_path / "train it.py"
    script.write_text(
        "import json, os, sys\nprint(json.dumps([os.environ['TPU_NAME'], os.environ['A'], sys.argv[1:]]))\nsys.exit(3)"
    )
    request = tpu.plan(
        job(
            command=(script.name, *ODD),
            working_dir=str(tmp_path),
            env={"A": ODD[1]},
            python=sys.executable,
            max_restarts=0,
            delete=True,
        )
    )
    assert tpu.submit(request, LogSettings()) == 3
    shown = capfd.readouterr()
    assert json.loads(shown.out.removeprefix("[tpu] ")) == ["local", ODD[1], ODD]
    calls = [json.loads(line)[3] for line in gcloud.read_text().splitlines()]
    assert calls == ["create", "ssh", "delete"]


@pytest.mark.processes
@pytest.mark.parametrize(("reason", "is_ours"), [("There is no more capacity in the zone", 1), ("ALREADY_EXISTS", 0)])
def test_a_tpu_that_can_not_be_made_is_one_line(gcloud, monkeypatch, reason: str, is_ours: int):
    monkeypatch.setenv("NO_TPU", f"ERROR: {reason}")
    with pytest.raises(requests.LaunchError, match=f"gcloud failed with exit code 1: ERROR: {reason}"):
        tpu.submit(tpu.plan(job(delete=True)), LogSettings())
    # One of that name may be another job's.
    assert gcloud.read_text().count("delete") == is_ours


def test_the_command_line(capsys):
    arguments = ["--accelerator_type=v4-8", "--zone=z", "--dry_run", "--nocreate", "train.py", "--x"]
    assert tpu.main(arguments) == 0
    assert capsys.readouterr().out.count("gcloud") == 1
