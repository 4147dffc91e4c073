# SPDX-License-Identifier: Apache-2.0
"""Parts of Keras on which the chief's writing rests; multi_worker_checks.py tests the writing itself."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.compat.keras import saving

pytestmark = pytest.mark.devices


def test_a_directory_is_published_at_a_remote_path_and_over_another(tmp_path):
    variables = tmp_path / "staging" / "exported" / "variables"
    variables.mkdir(parents=True)
    (variables / "index").write_text("values")
    (variables.parent / "saved_model.pb").write_text("graph")
    saving._publish(tmp_path / "staging", "ram://published/exported")
    found = [
        tf.io.gfile.GFile(f"ram://published/exported/{name}").read() for name in ("saved_model.pb", "variables/index")
    ]
    assert found == ["graph", "values"]
    (tmp_path / "exported" / "old").mkdir(parents=True)
    saving._publish(tmp_path / "staging", str(tmp_path / "exported"))
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == ["old", "saved_model.pb", "variables"]


@pytest.mark.parametrize("name", ["same", "linked", "other", "device"])
def test_only_another_path_than_the_chiefs_is_apart(tmp_path, name):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    paths = {"same": "real/m.keras", "linked": "link/m.keras", "other": "m.keras"}
    path = str(tmp_path / paths[name]) if name in paths else "/dev/null"
    assert saving._is_apart(path, saving._names(str(tmp_path / "real" / "m.keras"))) == (name == "other")
