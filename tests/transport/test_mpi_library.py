# SPDX-License-Identifier: Apache-2.0
"""Size and place in an MPI job are known before the library starts."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest

from tfdist.transport import mpi


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, None),
        ({"PMI_SIZE": "2", "PMI_PORT": "host:1234"}, 2),
        ({"PMIX_RANK": "0"}, None),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, 3),
    ],
)
def test_only_a_launcher_that_can_be_spoken_to_has_a_job(variables: dict[str, str], size: int | None):
    assert mpi.size_of_job(variables) == size


def test_a_descriptor_that_was_inherited_in_name_only_is_no_launcher(tmp_path: pathlib.Path):
    one, other = socket.socketpair()
    with one, other:
        variables = {"PMI_SIZE": "2", "PMI_FD": str(one.fileno())}
        assert mpi.size_of_job(variables) == 2
    assert mpi.size_of_job(variables) is None
    with (tmp_path / "file").open("w") as file:
        assert mpi.size_of_job({"PMI_SIZE": "2", "PMI_FD": str(file.fileno())}) is None


def test_another_job_s_variables_are_not_heard_and_come_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PMIX_RANK", "7")
    monkeypatch.setenv("PMI_SIZE", "9")
    with mpi._environment({"PMI_FD": "5", "PMI_SIZE": "2"}):
        assert "PMIX_RANK" not in os.environ
        assert (os.environ["PMI_FD"], os.environ["PMI_SIZE"]) == ("5", "2")
    assert (os.environ["PMIX_RANK"], os.environ["PMI_SIZE"]) == ("7", "9")
    assert "PMI_FD" not in os.environ
