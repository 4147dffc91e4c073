# SPDX-License-Identifier: Apache-2.0
"""Synthetic data in place of what the programs download: the same shapes and dtypes, a few hundred examples.

The data can be learned, so that losses fall: an image's label is where it is bright, a text's is one of its words.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import pathlib
import sys
import tarfile
import tempfile
import types
import unittest.mock
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

# Programs that index examples by the numbers of the true data set get as many.
_TRAIN = int(os.environ.get("TFDIST_PROGRAMS_EXAMPLES", "512"))
_TEST = 10000 if _TRAIN >= 10000 else 128
_SHAPES = {"mnist": (28, 28), "fashion_mnist": (28, 28), "cifar10": (32, 32, 3), "cifar100": (32, 32, 3)}
_WORDS = ["the", "a", "cat", "dog", "runs", "sleeps", "under", "over", "house", "tree", "good", "bad", "tea", "book"]
# Plotting and downloading, of which no program needs a result.
_MOCKED = (
    "imageio",
    "tensorflow_docs",
    "tensorflow_docs.vis",
    "tensorflow_docs.vis.embed",
    "seaborn",
    "pydot",
    "tensorflow_hub",
)


def install() -> None:
    """Replaces downloads in Keras and modules that are not installed."""
    import keras
    import tensorflow as tf

    for name in _SHAPES:
        for datasets in (keras.datasets, tf.keras.datasets):
            getattr(datasets, name).load_data = lambda name=name, **_: (_images(name, _TRAIN), _images(name, _TEST))
    keras.datasets.imdb.load_data = _imdb
    keras.utils.get_file = _get_file
    if not hasattr(keras.backend, "shape"):
        keras.backend.shape = keras.ops.shape  # in examples of Keras 3.0
    keras.utils.image_dataset_from_directory = _image_dataset
    keras.utils.text_dataset_from_directory = _text_dataset
    keras.utils.plot_model = keras.utils.model_to_dot = unittest.mock.MagicMock()
    _mock_missing_modules()
    tfds: Any = types.ModuleType("tensorflow_datasets")
    tfds.load, tfds.disable_progress_bar = _tfds_load, lambda: None
    tfds.__spec__ = importlib.machinery.ModuleSpec("tensorflow_datasets", None)
    sys.modules["tensorflow_datasets"] = tfds
    if importlib.util.find_spec("pandas") is not None:
        _read_tables()


def _read_tables() -> None:
    """Makes pandas read a made table where it is given an address."""
    import pandas

    read_csv = pandas.read_csv

    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        is_address = str(path).startswith("http")
        return read_csv(_get_file(origin=str(path)) if is_address else path, *args, **kwargs)

    pandas.read_csv = read


def _loader(arrays: Any, batch_size: int = 1, **_: Any) -> Any:
    import tensorflow as tf

    if not isinstance(arrays, tuple):
        # Examples of which the program keeps the arrays.
        columns = zip(*(arrays[index] for index in range(min(len(arrays), 512))), strict=True)
        arrays = tuple(np.stack(column) for column in columns)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


def _torch() -> types.ModuleType:
    torch: Any = types.ModuleType("torch")
    torch.from_numpy = lambda array: array
    torch.utils = types.SimpleNamespace(
        data=types.SimpleNamespace(TensorDataset=lambda *arrays: arrays, DataLoader=_loader, Dataset=object)
    )
    return torch


def _mock_missing_modules() -> None:
    for name in _MOCKED:
        if importlib.util.find_spec(name) is None:
            mocked = unittest.mock.MagicMock()
            mocked.__spec__, mocked.__path__ = importlib.machinery.ModuleSpec(name, None), []
            sys.modules[name] = mocked
    display = types.ModuleType("IPython.display")
    display.__dict__.update(dict.fromkeys(("display", "Image", "HTML", "Audio", "clear_output"), lambda *_, **__: None))
    # Matplotlib looks at these two.
    shell: Any = types.ModuleType("IPython")
    shell.display, shell.version_info, shell.get_ipython = display, (9, 0), lambda: None
    sys.modules.update({"IPython": shell, "IPython.display": display})
    download: Any = types.ModuleType("gdown")
    download.download = lambda url, output, **_: zipfile.ZipFile(output, "w").close()
    sys.modules["gdown"] = download
    if importlib.util.find_spec("torch") is None:
        sys.modules["torch"] = _torch()


def _images(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    random, shape = np.random.default_rng(count), _SHAPES[name]
    labels = random.integers(0, 10, count)
    images = random.integers(0, 128, (count, *shape))
    for index, label in enumerate(labels):
        images[index, label * 2 : label * 2 + 6, 8:20] += 127
    labels = labels.astype("uint8").reshape((count, 1) if len(shape) == 3 else (count,))
    return images.astype("uint8"), labels


def _imdb(num_words: int = 20000, **_: Any) -> Any:
    def reviews(count: int) -> Any:
        random = np.random.default_rng(count)
        labels = random.integers(0, 2, count)
        texts = [list(map(int, random.integers(2, min(num_words or 2000, 2000), 60) // 2 * 2 + y)) for y in labels]
        made = np.empty(count, object)
        made[:] = texts
        return made, labels

    return reviews(_TRAIN), reviews(_TEST)


def _tfds_load(name: str, split: Any = None, as_supervised: bool = False, with_info: bool = False, **_: Any) -> Any:
    import tensorflow as tf

    def part(count: int) -> Any:
        if name == "iris":
            random = np.random.default_rng(0)
            features = random.random((150, 4)).astype("float32")
            return tf.data.Dataset.from_tensor_slices({"features": features, "label": features.argmax(1) % 3})
        if name == "omniglot":
            labels = np.repeat(np.arange(10), 22)
            images = np.random.default_rng(0).integers(0, 255, (220, 105, 105, 3), np.uint8)
            return tf.data.Dataset.from_tensor_slices((images, labels))
        known = name if name in _SHAPES else "cifar10"
        images, labels = _images(known, count)
        images = images[..., None] if images.ndim == 3 else images
        labels = labels.reshape(-1).astype("int64")
        made = tf.data.Dataset.from_tensor_slices((images, labels % 2 if name == "cats_vs_dogs" else labels))
        return made if as_supervised else made.map(lambda image, label: {"image": image, "label": label})

    counts = {"train": _TRAIN, "test": _TEST, "validation": _TEST}
    splits = {key: types.SimpleNamespace(num_examples=150 if name == "iris" else n) for key, n in counts.items()}
    info = types.SimpleNamespace(splits=splits, features={"label": types.SimpleNamespace(num_classes=10)})
    if split is None:
        made: Any = {key: part(count) for key, count in counts.items()}
    elif isinstance(split, list | tuple):
        made = [part(_TRAIN if index == 0 else _TEST) for index, _ in enumerate(split)]
    else:
        made = part(_TRAIN if "train" in split else _TEST)
    return (made, info) if with_info else made


def _image_dataset(
    directory: Any = None, label_mode: Any = "int", image_size: Any = (256, 256), batch_size: Any = 32, **kwargs: Any
) -> Any:
    import tensorflow as tf

    count, channels = 96, {"grayscale": 1, "rgba": 4}.get(kwargs.get("color_mode", "rgb"), 3)
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, count)
    images = random.random((count, *image_size, channels)).astype("float32") * 255
    made = tf.data.Dataset.from_tensor_slices(images if label_mode is None else (images, labels.astype("int32")))
    made = made if batch_size is None else made.batch(batch_size)
    made = tf.data.Dataset.zip((made, made)) if kwargs.get("subset") == "both" else made
    made.class_names = ["first", "second"]
    return made


def _text_dataset(directory: Any = None, batch_size: Any = 32, **_: Any) -> Any:
    import tensorflow as tf

    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 256).astype("int32")
    texts = [" ".join([*random.choice(_WORDS[:10], 30), _WORDS[10 + label]]) for label in labels]
    made = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(batch_size)
    made.class_names = ["neg", "pos"]
    return made


def _get_file(fname: Any = None, origin: Any = None, **_: Any) -> str:
    """Writes a file or directory of that name, made by the first rule below whose key is part of its address."""
    address = f"{origin or ''} {fname or ''}"
    name = pathlib.Path(fname or origin.rsplit("/", 1)[-1].split("?")[0]).name
    directory = pathlib.Path(tempfile.mkdtemp(prefix="tfdist_programs_"))
    for key, write in _FILES.items():
        if key in address:
            return str(write(directory, name))
    raise FileNotFoundError(f"experiments/programs/stand_ins.py has nothing in place of {address}")


def _sentences(count: int, length: int = 6) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(_WORDS, length)) for _ in range(count)]


def _prose(directory: pathlib.Path, name: str) -> pathlib.Path:
    path = directory / name
    path.write_text(". ".join(_sentences(600)).lower())
    return path


def _translations(directory: pathlib.Path, name: str) -> pathlib.Path:
    lines = "\n".join(f"{line.title()}.\t{line[::-1]}!\tCC-BY" for line in _sentences(400, 3))
    pathlib.Path("fra.txt").write_text(lines)
    (directory / "spa-eng").mkdir()
    (directory / "spa-eng" / "spa.txt").write_text("\n".join(line.rsplit("\t", 1)[0] for line in lines.split("\n")))
    path = directory / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fra.txt", lines)
    return path


def _movielens(directory: pathlib.Path, name: str) -> pathlib.Path:
    random = np.random.default_rng(0)
    rows = [f"{random.integers(1, 60)},{random.integers(1, 90)},{random.integers(1, 11) / 2},9" for _ in range(1500)]
    movies = [f"{number},Film {number},Drama|War" for number in range(1, 91)]
    path = directory / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ml-latest-small/ratings.csv", "\n".join(["userId,movieId,rating,timestamp", *rows]))
        archive.writestr("ml-latest-small/movies.csv", "\n".join(["movieId,title,genres", *movies]))
    return path


def _climate(directory: pathlib.Path, name: str) -> pathlib.Path:
    header = "Date Time,p (mbar),T (degC),Tpot (K),Tdew (degC),rh (%),VPmax (mbar),VPact (mbar),VPdef (mbar),sh (g/kg)"
    header += ",H2OC (mmol/mol),rho (g/m**3),wv (m/s),max. wv (m/s),wd (deg)"
    waves = np.sin(np.arange(6000)[:, None] / np.arange(5, 19)[None]) + 2
    lines = [f"01.01.2009 00:{i % 60:02}:00," + ",".join(f"{x:.3f}" for x in row) for i, row in enumerate(waves)]
    path = directory / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("jena_climate_2009_2016.csv", "\n".join([header, *lines]))
    return path


def _cora(directory: pathlib.Path, name: str) -> pathlib.Path:
    random = np.random.default_rng(0)
    (directory / "cora").mkdir()
    kinds = ["Case_Based", "Theory", "Neural_Networks", "Rule_Learning"]
    labels = random.integers(0, 4, 300)
    words = random.integers(0, 2, (300, 1433))
    papers = ["\t".join([str(100 + i), *map(str, words[i]), kinds[labels[i]]]) for i in range(300)]
    cites = [f"{100 + a}\t{100 + b}" for a, b in random.integers(0, 300, (900, 2))]
    (directory / "cora" / "cora.content").write_text("\n".join(papers) + "\n")
    (directory / "cora" / "cora.cites").write_text("\n".join(cites) + "\n")
    path = directory / "cora.tgz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(directory / "cora", "cora")
    return path


def _reviews(directory: pathlib.Path, name: str) -> pathlib.Path:
    random, path = np.random.default_rng(0), directory / name
    for part in ("train", "test"):
        for kind, word in (("pos", "good"), ("neg", "bad"), ("unsup", "so")):
            (directory / "aclImdb" / part / kind).mkdir(parents=True, exist_ok=True)
            for index in range(64):
                review = " ".join([*random.choice(_WORDS, 40), word])
                (directory / "aclImdb" / part / kind / f"{index}_7.txt").write_text(review)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(directory / "aclImdb", "aclImdb")
    return path


def _person(random: Any, index: int) -> list[Any]:
    words = [f" c{column}{random.integers(0, 3)}" for column in range(14)]
    for column in (0, 2, 4, 10, 11, 12):
        words[column] = random.integers(1, 90)
    return [*words, " >50K" if index % 4 == 0 else " <=50K"]


def _table(
    columns: list[str], of_row: Callable[[Any, int], list[Any]], count: int = 400
) -> Callable[..., pathlib.Path]:
    def write(directory: pathlib.Path, name: str) -> pathlib.Path:
        random, path = np.random.default_rng(0), directory / name
        lines = [",".join(map(str, of_row(random, index))) for index in range(count)]
        path.write_text("\n".join([",".join(columns), *lines] if columns else lines) + "\n")
        return path

    return write


_CARD_FRAUD = ["Time", *(f"V{i}" for i in range(1, 29)), "Amount", "Class"]
_FILES: dict[str, Callable[[pathlib.Path, str], pathlib.Path]] = {
    "nietzsche": _prose,
    "shakespeare": _prose,
    "fra-eng": _translations,
    "spa-eng": _translations,
    "ml-latest": _movielens,
    "jena_climate": _climate,
    "cora": _cora,
    "aclImdb": _reviews,
    "/adult/": _table([], _person),
    "creditcard": _table(_CARD_FRAUD, lambda random, index: [*random.random(30).round(4), (index % 7 == 0 and 1) or 0]),
}


def credit_cards() -> None:
    """Writes the table that a program reads from its author's directory."""
    pathlib.Path("creditcard.csv").write_text(pathlib.Path(_get_file("creditcard.csv")).read_text())


def film_reviews() -> None:
    """Writes the texts that a program has the shell fetch."""
    _reviews(pathlib.Path(), "aclImdb_v1.tar.gz")


def captchas(directory: pathlib.Path, count: int = 48) -> None:
    """Writes pictures whose file names are the five characters that they stand for."""
    from PIL import Image

    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for _ in range(count):
        word = "".join(random.choice([*"abcde2345"], 5))
        data = random.integers(0, 255, (50, 200), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(data).save(buffer, "PNG")
        (directory / f"{word}.png").write_bytes(buffer.getvalue())
