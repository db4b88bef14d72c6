"""Inspection of the namespace: the array API standard's version, devices, dtypes, constants and limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.registry import load
from tests.layouts import everywhere, mesh_of


def test_the_namespace_of_a_tensor() -> None:
    x = st.zeros(3)
    assert x.__array_namespace__() is st
    assert x.__array_namespace__(api_version="2021.12") is st
    assert x.__array_namespace__(api_version=st.__array_api_version__) is st
    with pytest.raises(st.ArgumentError, match=r"__array_namespace__: api_version='2019\.12'; wanted 2021\.12, "):
        x.__array_namespace__(api_version="2019.12")


@everywhere
def test_dtypes_of_a_device(backend: str) -> None:
    info = st.__array_namespace_info__()
    for device in (mesh_of((2,), backend), st.devices(backend)[1]):
        known = info.dtypes(device=device)
        assert all(st.zeros(2, dtype=dtype, device=device).dtype == dtype for dtype in known.values())
        assert ("uint16" in known) == load(backend).has_dtype(np.dtype("uint16"))
        assert list(info.dtypes(device=device, kind=("bool", "complex floating"))) == [
            "bool",
            "complex64",
            "complex128",
        ]
    assert info.default_dtypes(device=device)["integral"] == st.arange(3).dtype


def test_devices() -> None:
    info = st.__array_namespace_info__()
    assert info.default_device() == st.zeros(3).device
    assert info.default_device() in info.devices()
    for device in info.devices():
        assert st.zeros(3, device=device).device == device
    with st.use_mesh(mesh_of((1,), "numpy", 3)):
        assert info.default_device() == st.devices()[3]
        assert info.default_device() in info.devices()
    assert info.capabilities()["boolean indexing"] is True
    with pytest.raises(st.ArgumentError, match="dtypes"):
        info.dtypes(kind="quaternion")
    with pytest.raises(st.ArgumentTypeError, match="kind is 3"):
        info.dtypes(kind=3)  # type: ignore[arg-type]


def test_dtypes_and_constants_are_numpys() -> None:
    for name in [*st.__array_namespace_info__().dtypes(), "float16"]:
        assert getattr(st, name) is getattr(np, name)
        assert st.zeros(2, dtype=getattr(st, name)).dtype == getattr(st, name)
    assert (st.pi, st.e, st.inf, st.newaxis) == (np.pi, np.e, np.inf, None)
    assert st.nan != st.nan
    assert st.arange(3)[st.newaxis].shape == (1, 3)


def test_limits() -> None:
    for dtype, part in (("float16", "float16"), ("float32", "float32"), ("complex128", "float64")):
        for given in (dtype, np.dtype(dtype), getattr(np, dtype), st.zeros(2, dtype=dtype), np.zeros(2, dtype)):
            found, wanted = st.finfo(given), np.finfo(part)
            for name in ("bits", "eps", "max", "min", "smallest_normal", "tiny"):
                value = getattr(found, name)
                assert type(value) is (int if name == "bits" else float)
                assert value == getattr(wanted, name)
            assert found.dtype == np.dtype(part)
    for given in ("uint8", np.int16, st.zeros(2, dtype="int64")):
        dtype_of = getattr(given, "dtype", given) if not isinstance(given, type) else given
        integers = st.iinfo(given)
        assert (integers.min, integers.max) == (np.iinfo(dtype_of).min, np.iinfo(dtype_of).max)
    for call, given in ((st.finfo, "int8"), (st.iinfo, "float32"), (st.iinfo, bool), (st.finfo, "no dtype")):
        with pytest.raises(st.ArgumentTypeError, match=f"^{call.__name__}: "):
            call(given)


KINDS: list[Any] = [
    "bool",
    "integral",
    "numeric",
    "real floating",
    ("bool", "complex floating"),
    np.int8,
    ("integral", st.float64),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_isdtype(kind: Any) -> None:
    for dtype in st.__array_namespace_info__().dtypes().values():
        assert st.isdtype(dtype, kind) is np.isdtype(dtype, kind)


def test_casts() -> None:
    x = st.zeros(2, dtype="float32")
    assert st.can_cast(x, "float64") is True
    assert st.can_cast(x, "int64") is False
    assert st.can_cast("int64", "int8", "same_kind") is True
    for call, kind, message in (
        (lambda: st.can_cast(1.0, "float32"), TypeError, "^can_cast: "),
        (lambda: st.can_cast("f4", "f8", "bogus"), ValueError, "^can_cast: "),
        (lambda: st.isdtype("float32", "bogus"), ValueError, "^isdtype: "),
        (lambda: st.isdtype("float32", 3), TypeError, "^isdtype: "),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_astype_transfers(backend: str) -> None:
    x = st.arange(6, device=mesh_of((3,), backend))
    made = st.astype(x, "float32", device=st.devices(backend)[5])
    assert (made.device, made.dtype, made.tolist()) == (st.devices(backend)[5], np.float32, [0, 1, 2, 3, 4, 5])
    assert st.astype(x, x.dtype, copy=False, device=x.sharding).sharding == x.sharding
