# SPDX-License-Identifier: Apache-2.0
"""Kernels of both kinds; a C library is compiled if the installation has none."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

from tfdist.compression import fallback, native

_SOURCE = pathlib.Path(native.__file__).parent / "_native.c"


@pytest.fixture(scope="session")
def native_kernels(tmp_path_factory: pytest.TempPathFactory) -> native.NativeKernels:
    """The compiled kernels of the source as it is."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("native") / "_native.so"
    # Such as -fsanitize=address,undefined; the library of a sanitizer must be loaded first, by LD_PRELOAD.
    more = os.environ.get("TFDIST_TEST_CFLAGS", "").split()
    flags = ["-O3", "-ffp-contract=off", "-fPIC", "-shared", *more]
    subprocess.run([compiler, *flags, "-o", str(path), str(_SOURCE)], check=True)
    return native.NativeKernels(path)


@pytest.fixture(params=["native", "numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native.Kernels:
    """Each kind of kernels in turn, also for the codecs."""
    is_native = request.param == "native"
    chosen = request.getfixturevalue("native_kernels") if is_native else fallback.NumpyKernels()
    monkeypatch.setattr(native, "kernels", lambda: chosen)
    return chosen
