# SPDX-License-Identifier: Apache-2.0
"""Resume under MultiWorkerMirroredStrategy with a single worker, from the start or after a job shrank to one."""

from __future__ import annotations

import pathlib
import textwrap
from typing import Any

import process_cluster
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

TRAIN = """
strategy = tfdist.MultiWorkerMirroredStrategy()
sys.path.insert(0, TESTS)
from cutting_off import CutOff, CutOffError

X = np.random.default_rng(0).normal(size=(90, 3)).astype("float32")
DATA = tf.data.Dataset.from_tensor_slices((X, X[:, :1]))
KINDS = {
    "arrays": lambda: dict(x=X, y=X[:, :1], batch_size=8),
    "shuffled": lambda: dict(x=DATA.shuffle(90, seed=3).batch(8)),
}


class Seeing(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.drop = keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.2)
        self.last = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.last(self.drop(self.hidden(x), training=training))

    def train_step(self, data):
        return {**super().train_step(data), "seen": tf.reduce_mean(data[0])}


class Steps(keras.callbacks.Callback):
    def __init__(self, resume):
        super().__init__()
        self.resume, self.seen = resume, {}

    def on_train_batch_end(self, batch, logs=None):
        self.seen[self.resume.step + 1] = float(logs["seen"])


def train(kind, directory, *callbacks):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = Seeing()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    resume = tfdist.callbacks.Resume(directory, 5)
    steps = Steps(resume)
    try:
        model.fit(**KINDS[kind](), epochs=3, verbose=0, callbacks=[steps, resume, *callbacks])
    except CutOffError:
        pass
    return steps.seen
"""


def _script(text: str, **names: Any) -> str:
    given = {"TESTS": str(pathlib.Path(__file__).parents[1] / "support"), **names}
    return "".join(f"{name} = {value!r}\n" for name, value in given.items()) + TRAIN + textwrap.dedent(text)


@pytest.mark.parametrize("kinds", [["shuffled"], pytest.param(["arrays"], marks=pytest.mark.slow)], ids=str)
def test_shrunk_job_resumes_at_the_same_global_batch(tmp_path: pathlib.Path, kinds: list[str]):
    """Two workers are interrupted, and one goes on with the batches that both would have read."""
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    one.mkdir()
    script = """
    for kind in KINDS:
        if kind in CHOSEN:
            report(kind, train(kind, shared / f"{kind} calm"))
            train(kind, shared / kind, CutOff(17))
    """
    calm = process_cluster.run(_script(script, CHOSEN=kinds), two, timeout_secs=600)
    script = """
    for kind in CHOSEN:
        report(kind, train(kind, os.path.join(TWO, kind)))
    """
    (resumed,) = process_cluster.run(_script(script, CHOSEN=kinds, TWO=str(two)), one, num_workers=1, timeout_secs=250)
    assert "of the user's own" not in (one / "0.log").read_text()
    for kind in kinds:
        assert calm[0][kind].keys() == calm[1][kind].keys()
        assert [*resumed[kind]] == [*calm[0][kind]][15:]
        for step, seen in resumed[kind].items():
            assert seen == pytest.approx(calm[0][kind][step], rel=1e-4, abs=1e-6)
