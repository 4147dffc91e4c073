# SPDX-License-Identifier: Apache-2.0
"""The chief's own producer of the tf.data service starts wherever it is: else Python would stop in the chief."""

from __future__ import annotations

import os
import subprocess
import sys

import programs
import pytest

# A process of its own: what fails here holds Python's lock for ever.
START = """
import os, sys
from tfdist.serving.embedded import DataService
print(DataService(sys.argv[1], None).address(endless=False))
print(os.environ.get("no_grpc_proxy"))
"""


@pytest.mark.processes
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("host", "env"),
    [
        # "both" has these. A name that the other tasks know:
        pytest.param("chief.invalid", {}, marks=pytest.mark.slow),
        pytest.param("127.0.0.1", {"http_proxy": "http://127.0.0.1:9"}, marks=pytest.mark.slow),
        ("chief.invalid", {"http_proxy": "http://127.0.0.1:9", "no_grpc_proxy": "elsewhere.invalid"}),
    ],
    ids=["unknown name", "proxy", "both"],
)
def test_producer_of_the_chief_starts_without_its_own_name(host: str, env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, host],
        env={**os.environ, **env},
        cwd=programs.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    address, no_proxy = done.stdout.splitlines()
    assert address.startswith(f"grpc://{host}:")
    assert no_proxy == str(env.get("no_grpc_proxy"))
