# SPDX-License-Identifier: Apache-2.0
"""Files of models that several workers write and load; `multi_worker_checks.py` has them save together."""

from __future__ import annotations

import fcntl
import os
import pathlib
import threading
from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from tfdist.compat.keras import saving


def written(path: pathlib.Path, value: object) -> str:
    variable = tf.Variable(value)
    return tf.train.Checkpoint(variable=variable, text=tf.Variable(["a", "b"])).write(str(path))


def value_of(path: pathlib.Path) -> object:
    reader = tf.train.load_checkpoint(str(path))
    return reader.get_tensor("variable/.ATTRIBUTES/VARIABLE_VALUE").tolist()


def test_other_values_take_their_place(tmp_path: pathlib.Path):
    there, late = written(tmp_path / "ckpt", 1.0), written(tmp_path / "late", 2.0)
    saving.publish_checkpoint(late, there)
    assert value_of(tmp_path / "ckpt") == 2.0
    assert not list(tmp_path.glob("late*"))


def is_locked(folder: pathlib.Path) -> bool:
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(directory)
    return False


def test_lock_that_is_never_released_is_not_waited_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saving, "LOCK_SECS", 0.05)
    prefix = str(tmp_path / "ckpt")
    with saving.locked(prefix, fcntl.LOCK_SH), saving.locked(prefix, fcntl.LOCK_SH):
        with saving.locked(prefix, fcntl.LOCK_EX):
            assert is_locked(tmp_path)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_path_outside_of_this_machine_is_not_locked(monkeypatch: pytest.MonkeyPatch):
    taken: list[object] = []
    monkeypatch.setattr(fcntl, "flock", lambda *given: taken.append(given))
    with saving.locked("gs://bucket/ckpt", fcntl.LOCK_EX):
        taken.append("inside")
    assert taken == ["inside"]


def test_clearing_removes_tasks_and_keeps_local_devices():
    task, config = "/job:worker/replica:0/task:1", tf.compat.v1.ConfigProto(device_filters=["/job:ps"])
    config.experimental.collective_group_leader = task
    config.device_count["CPU"] = 2
    graph = meta_graph_pb2.MetaGraphDef()
    node = graph.graph_def.node.add(device=f"{task}/device:GPU:1")
    node.attr["config_proto"].s = config.SerializeToString()
    graph.graph_def.library.function.add().node_def.add(device=task)
    graph.object_graph_def.nodes.add().resource.device = f"{task}/device:CPU:0"
    graph.object_graph_def.nodes.add().user_object.identifier = "no device"
    saving.clear_tasks_of(graph)
    assert node.device == "/device:GPU:1"
    config = tf.compat.v1.ConfigProto.FromString(node.attr["config_proto"].s)
    assert (list(config.device_filters), config.experimental.collective_group_leader) == ([], "")
    assert config.device_count["CPU"] == 2
    assert graph.graph_def.library.function[0].node_def[0].device == ""
    resource, other = graph.object_graph_def.nodes
    assert resource.resource.device == "/device:CPU:0"
    assert other.WhichOneof("kind") == "user_object"


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


REPLACED = [
    *((keras.saving, "load_model"), (keras.models, "load_model"), (tf.saved_model, "load")),
    (keras.Model, "load_weights"),
]


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    saving.wait_for_files("worker:1")


def model() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


@pytest.mark.usefixtures("as_worker")
def test_a_load_waits_for_the_chiefs_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    saved, path = model(), tmp_path / "saved.keras"

    def save() -> None:
        saved.save(tmp_path / "staged.keras")
        (tmp_path / "staged.keras").replace(path)

    late = threading.Timer(0.2, save)
    late.start()
    assert keras.models.load_model(path).count_params() == 2
    late.join()
    assert f"worker:1 waits up to 10 s for {path}" in capsys.readouterr().err
    keras.saving.load_model(filepath=path)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("as_worker")
@pytest.mark.parametrize(
    ("load", "error"),
    [
        (lambda path: keras.models.load_model(path / "no.keras"), ValueError),
        (lambda path: model().load_weights(path / "no.weights.h5"), FileNotFoundError),
        (lambda path: tf.saved_model.load(path / "no"), OSError),
    ],
)
def test_a_file_that_never_appears_is_the_usual_error(tmp_path, monkeypatch, capsys, load, error):
    monkeypatch.setattr(saving, "WAIT_SECS", 0.01)
    with pytest.raises(error, match="no"):
        load(tmp_path)
    assert "worker:1 waits up to 0.01 s for" in capsys.readouterr().err
