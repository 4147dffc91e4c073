# SPDX-License-Identifier: Apache-2.0
"""Kernels: C against NumPy bit for bit, positions beyond 32 bits, and installations without a library."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tfdist.compression import fallback, gathered, native

# All bit patterns but those of NaN and infinity, which have a test of their own.
_FLOATS = arrays.arrays(np.float32, st.shared(st.integers(0, 300), key="size"), elements=st.floats(width=32))
_BOUNDS = st.sampled_from([0.0, 1e-40, gathered.SMALLEST, 1e-3, 0.5, 1.0, gathered.LARGEST])
_SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)


@_SETTINGS
@given(a=_FLOATS, b=_FLOATS, bound=_BOUNDS, capacity=st.integers(0, 300), first=st.integers(0, 2**60))
def test_add_is_equal_in_c_and_numpy(
    native_kernels: native.NativeKernels, a: np.ndarray, b: np.ndarray, bound: float, capacity: int, first: int
):
    found = []
    for kernels in (native_kernels, fallback.NumpyKernels()):
        out, entries = np.zeros(a.size, np.float32), np.full(capacity, -7)
        count = kernels.add(a, b, out, np.float32(bound), first, entries)
        # Those beyond the last entry are scratch.
        entries[count:] = -7
        # After a value that is not finite nobody reads the rest.
        found.append((count, None) if count is None else (count, out.tobytes() + entries.tobytes()))
    assert found[0] == found[1]


@_SETTINGS
@given(u=_FLOATS, v=_FLOATS, g=_FLOATS, momentum=st.sampled_from([0.0, 0.5, 0.9]), bound=_BOUNDS)
def test_correct_is_equal_in_c_and_numpy(
    native_kernels: native.NativeKernels,
    u: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    momentum: float,
    bound: float,
):
    found = []
    for kernels in (native_kernels, fallback.NumpyKernels()):
        velocity, out, entries = np.zeros(u.size, np.float32), np.zeros(u.size, np.float32), np.full(u.size, -7)
        count = kernels.correct(u, v, g, momentum, velocity, out, np.float32(bound), 5, entries)
        entries[count:] = -7
        arrays_found = velocity.tobytes() + out.tobytes() + entries.tobytes()
        found.append((count, None) if count is None else (count, arrays_found))
    assert found[0] == found[1]


@_SETTINGS
@given(values=_FLOATS, total=_FLOATS, scale=st.floats(0, 2.0**100, width=32))
def test_signs_are_equal_in_c_and_numpy(
    native_kernels: native.NativeKernels, values: np.ndarray, total: np.ndarray, scale: float
):
    found = []
    for kernels in (native_kernels, fallback.NumpyKernels()):
        left, received = values.copy(), total.copy()
        bits = kernels.take_signs(left, scale)
        kernels.add_signs(received, scale, bits)
        found.append(bits.tobytes() + left.tobytes() + received.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_each_value_that_is_not_finite_is_found(kernels: native.Kernels, size: int, bad: float):
    for index in {0, size // 2, size - 1}:
        a, zeros = np.zeros(size, np.float32), np.zeros(size, np.float32)
        a[index] = bad
        for bound in (0.5, gathered.LARGEST):
            assert kernels.add(a, zeros, np.empty_like(a), bound, 0, np.empty(size, np.int64)) is None
            assert kernels.correct(zeros, a, zeros, 0.9, a.copy(), a.copy(), bound, 0, np.empty(0, np.int64)) is None


def test_sums_that_overflow_are_not_finite(kernels: native.Kernels):
    large = np.full(100, 3e38, np.float32)
    assert kernels.add(large, large, np.empty_like(large), gathered.LARGEST, 0, np.empty(0, np.int64)) is None


def test_positions_beyond_32_bits_are_exact(kernels: native.Kernels):
    values, entries, first = np.array([0, 2, -3, 0], np.float32), np.empty(4, np.int64), 2**40 + 1
    count = kernels.add(values, np.zeros(4, np.float32), np.empty(4, np.float32), 1.0, first, entries)
    assert entries[:count].tolist() == [2 * (first + 1), 2 * (first + 2) + 1]
    slices = gathered.slices_of(entries[:count], [2**40, 3, 2**35])
    assert [entries[each].size for each in slices] == [0, 1, 1]
    total = np.zeros(4, np.float32)
    kernels.scatter(total, first, entries[:count], 0.5)
    assert total.tolist() == [0, 0.5, -0.5, 0]


def test_entries_outside_of_a_tensor_are_refused(native_kernels: native.NativeKernels):
    with pytest.raises(IndexError):
        native_kernels.scatter(np.zeros(3, np.float32), 10, np.array([2 * 13]), 1.0)


def test_arrays_of_other_dtypes_and_strides_are_refused(native_kernels: native.NativeKernels):
    good, entries = np.zeros(4, np.float32), np.empty(4, np.int64)
    for bad in (np.zeros(4), np.zeros(8, np.float32)[::2], np.zeros(3, np.float32)):
        with pytest.raises(TypeError, match="needs 4 contiguous values of float32"):
            native_kernels.add(bad, good, good.copy(), 1.0, 0, entries)


def test_without_a_library_numpy_is_chosen_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(native, "library_path", lambda: None)
    native.kernels.cache_clear()
    try:
        assert native.kernels() is native.kernels()
        assert native.kernels().name == "numpy"
    finally:
        native.kernels.cache_clear()
    said = capsys.readouterr().err
    assert said.startswith("tfdist: compression runs in NumPy") and said.count("\n") == 1


def test_libraries_of_other_versions_are_refused(tmp_path: pathlib.Path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = pathlib.Path(native.__file__).with_name("_native.c").read_text()
    now = f"#define VERSION {native.VERSION}"
    assert now in source
    for name, code, text in (
        ("other", source.replace(now, "#define VERSION 99"), f"has version 99, needed is {native.VERSION}"),
        ("empty", "int other;", "lacks a function"),
    ):
        (tmp_path / f"{name}.c").write_text(code)
        library = tmp_path / f"{name}.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / f"{name}.c"], check=True)
        with pytest.raises(OSError, match=text):
            native.NativeKernels(library)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(OSError):
        native.NativeKernels(tmp_path / "text.so")
