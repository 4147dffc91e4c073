# SPDX-License-Identifier: Apache-2.0
"""The guard in conftest.py catches each kind of leak, and lets a clean test pass."""

from __future__ import annotations

import pathlib

import prefork
import pytest

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.processes

LEAKS = {
    "environment variable LEAKED": "import os; os.environ['LEAKED'] = '1'",
    "environment variable KEPT": "import os; del os.environ['KEPT']",
    "thread 'leaked'": "import threading, time; threading.Thread(target=time.sleep, args=[1], name='leaked').start()",
    "process": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)",
}


def _run(pytester: pytest.Pytester, body: str, *arguments: str) -> pytest.RunResult:
    source = pathlib.Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    pytester.makeconftest(source.replace("_GRACE_SECS = 5.0", "_GRACE_SECS = 0.1"))
    # conftest.py imports it.
    pytester.path.joinpath("prefork.py").symlink_to(pathlib.Path(prefork.__file__))
    pytester.makepyfile(f"def test_it():\n    {body}")
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_fails_its_test(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, leak: str):
    monkeypatch.setenv("KEPT", "1")
    result = _run(pytester, LEAKS[leak])
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*this test left behind: {leak}*"])


def test_what_is_cleaned_up_passes(pytester: pytest.Pytester):
    _run(pytester, "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])").assert_outcomes(passed=1)


def test_cpu_is_split_before_a_conftest_starts_tensorflow(pytester: pytest.Pytester):
    folder = pytester.mkdir("inner")
    folder.joinpath("conftest.py").write_text("import tensorflow as tf\ntf.constant(0)")
    check = "import tensorflow as tf\n\ndef test_devices():\n    assert len(tf.config.list_logical_devices('CPU')) == 4"
    folder.joinpath("test_inner.py").write_text(check)
    _run(pytester, "pass", "inner").assert_outcomes(passed=1)
