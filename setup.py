# SPDX-License-Identifier: Apache-2.0
"""Builds and installs tfdist. BUILD.md says why each dependency is there and what it costs."""

import pathlib
import re

import setuptools

_HERE = pathlib.Path(__file__).parent
_MPI = ["mpi4py>=4.1", "mpich>=4.3"]
_TENSORBOARD = ["tensorboard>=2.20,<2.22"]
_BROWSER = [*_TENSORBOARD, "websocket-client>=1.8"]
_PYTEST = ["pytest>=8.4", "pytest-timeout>=2.3", "pytest-xdist>=3.6"]
_NOTEBOOKS = ["ipykernel>=6.29", "nbclient>=0.10"]
_TESTS = [*_MPI, *_BROWSER, *_PYTEST, *_NOTEBOOKS, "hypothesis>=6.100", "psutil>=5.9"]
# mkdocstrings lays out signatures with ruff.
_DOCS = ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29", "ruff>=0.9"]
_EXPERIMENTS = ["matplotlib>=3.8", "scikit-learn>=1.5", *_TENSORBOARD]


def _read(name: str) -> str:
    path = _HERE / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _long_description() -> str:
    """The README for a package registry, where links to files lead nowhere: they become names, and pictures go."""
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", _read("README.md"))
    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", r"\1 (`\2`)", text)


def _version() -> str:
    match = re.search(r'^__version__ = "([^"]+)"', _read("tfdist/__init__.py"), re.MULTILINE)
    if match is None:
        raise RuntimeError('tfdist/__init__.py has no line __version__ = "..."; put it back.')
    return match.group(1)


setuptools.setup(
    name="tfdist",
    version=_version(),
    description="The distribution toolkit for TensorFlow and Keras 3: model.fit on many processes, one name changed.",
    long_description=_long_description(),
    long_description_content_type="text/markdown",
    author="The tfdist authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="tensorflow keras distributed training parameter server multi-worker",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=setuptools.find_packages(include=["tfdist", "tfdist.*"]),
    package_data={"tfdist": ["py.typed"], "tfdist.watching.tensorboard": ["static/*.js", "static/*.css"]},
    zip_safe=False,
    python_requires=">=3.11,<3.14",
    install_requires=[
        "absl-py>=2.1",
        "keras>=3.15,<3.17",
        "numpy>=1.26",
        "pyyaml>=6.0",
        "rich>=13.7",
        "tensorflow>=2.20,<2.22",
    ],
    extras_require={
        "mpi": _MPI,
        "gpu": ["tensorflow[and-cuda]>=2.20,<2.22"],
        "tensorboard": _TENSORBOARD,
        "experiments": _EXPERIMENTS,
        "bench": [*_MPI, "psutil>=5.9", "py-spy>=0.4", "tf-keras>=2.20,<2.22"],
        "bench-torch": ["torch>=2.5", "jax>=0.4.38"],
        "browser": _BROWSER,
        "docs": _DOCS,
        "ray": ["ray[default,train]>=2.50"],
        "release": ["build>=1.2", "twine>=6.1"],
        "test": _TESTS,
        "dev": [*_TESTS, *_EXPERIMENTS, "pyright[nodejs]>=1.1.390", "ruff>=0.9"],
    },
    entry_points={
        "console_scripts": ["tfdist=tfdist.cli:main"],
        "tensorboard_plugins": ["tfdist=tfdist.watching.tensorboard.plugin:TfdistPlugin"],
    },
)
