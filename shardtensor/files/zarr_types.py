"""The names of dtypes and the values that fill holes, in the metadata of zarr v3.

Names are those that zarr-python, tensorstore and the registry of zarr's extensions use: ``float32``, ``bfloat16``,
``float8_e4m3``, ``numpy.datetime64`` with its unit. NumPy's ``longdouble``, of which the format differs between
machines and no reader knows a name, is stored as ``raw_bytes``, and an attribute names it and its precision.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardtensor.backend.small_floats import SMALL_FLOATS, is_element, is_small_float, small_float
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.host.summation_order import HostArray

DType = np.dtype[Any]

_PLAIN = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip

_UNITS = ("generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "μs")

RAW = "shardtensor_raw"
"""The attribute that names the dtype of raw bytes."""


def name_of(dtype: DType) -> tuple[Any, dict[str, Any]]:
    """Returns the data type of a dtype, and the attributes that an array of it needs.

    Raises:
        ArgumentTypeError: tensors have no such dtype.
    """
    if not is_element(dtype):
        raise ArgumentTypeError(f"elements of dtype {dtype} cannot be stored; wanted a bool, a number or a time")
    if dtype.kind in "mM":
        unit, factor = np.datetime_data(dtype)
        name = "numpy.datetime64" if dtype.kind == "M" else "numpy.timedelta64"
        return {"name": name, "configuration": {"unit": unit, "scale_factor": factor}}, {}
    if dtype.name in _PLAIN or is_small_float(dtype):
        return dtype.name, {}
    return _raw_bytes(dtype), {RAW: _raw(dtype)}


def _raw_bytes(dtype: DType) -> dict[str, Any]:
    return {"name": "raw_bytes", "configuration": {"length_bytes": dtype.itemsize}}


def _raw(dtype: DType) -> dict[str, Any]:
    """Describes a longdouble: dtypes with equal descriptions have equal formats."""
    return {"dtype": dtype.name, "mantissa": int(np.finfo(dtype).nmant), "byteorder": sys.byteorder}


def dtype_of(data_type: Any, attributes: Mapping[str, Any], name: str) -> DType:
    """Returns the dtype with a data type, in the byte order of the machine.

    Raises:
        ArgumentError: the data type is broken.
        ArgumentTypeError: tensors have no such dtype.
    """
    if isinstance(data_type, str):
        if data_type in _PLAIN:
            return np.dtype(data_type)
        if data_type in SMALL_FLOATS:
            return small_float(data_type)
    elif isinstance(data_type, dict) and data_type.get("name") == "raw_bytes" and RAW in attributes:
        for dtype in (np.dtype(np.longdouble), np.dtype(np.clongdouble)):
            if data_type == _raw_bytes(dtype) and attributes[RAW] == _raw(dtype):
                return dtype
        raise ArgumentTypeError(
            f"{name}: its elements are {str(attributes[RAW])[:120]}, a format that this machine does not have"
        )
    elif isinstance(data_type, dict) and data_type.get("name") in ("numpy.datetime64", "numpy.timedelta64"):
        settings = data_type.get("configuration")
        unit, factor = (settings.get(k) for k in ("unit", "scale_factor")) if isinstance(settings, dict) else (None, 0)
        if unit not in _UNITS or type(factor) is not int or not 1 <= factor < 1 << 31:
            raise ArgumentError(f"{name} is broken: the unit of its times is {str(settings)[:120]}")
        text = "" if unit == "generic" else f"[{factor}{'us' if unit == 'μs' else unit}]"
        return np.dtype(f"{'M' if data_type['name'] == 'numpy.datetime64' else 'm'}8{text}")
    raise ArgumentTypeError(
        f"{name}: the data type {str(data_type)[:120]!r} is not one of tensors: bool, integers, floating-point and "
        "complex numbers, and times"
    )


# -- values of holes -------------------------------------------------------------------------------


def zero_of(dtype: DType) -> Any:
    """Returns the value of holes that is written: zero, of times NaT, which readers expect."""
    if dtype.kind in "mM":
        return -(1 << 63)
    if dtype.kind == "b":
        return False
    if dtype.name not in _PLAIN and not is_small_float(dtype):
        return base64.b64encode(bytes(dtype.itemsize)).decode()
    if dtype.kind == "c":
        return [0.0, 0.0]
    return 0 if dtype.kind in "iu" else 0.0


def fill_of(value: Any, dtype: DType, name: str) -> HostArray:
    """Returns the element of holes as an array without dimensions.

    Raises:
        ArgumentError: it is none of the dtype.
    """
    try:
        element = _element(value, dtype)
    except (ValueError, OverflowError, TypeError):
        element = None
    if element is None:
        raise ArgumentError(f"{name} is broken: its fill_value {str(value)[:60]!r} is no element of dtype {dtype}")
    return element


def _element(value: Any, dtype: DType) -> HostArray | None:
    plain = dtype.name in _PLAIN or is_small_float(dtype) or dtype.kind in "mM"
    if not plain:
        content = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
        return np.frombuffer(content, dtype).reshape(()) if len(content) == dtype.itemsize else None
    if dtype.kind in "mM":
        value = -(1 << 63) if value == "NaT" else value
        return np.array(value, np.int64).view(dtype) if type(value) is int else None
    if dtype.kind == "b":
        return np.array(value) if type(value) is bool else None
    if dtype.kind in "iu":
        return np.array(value, dtype) if type(value) is int else None
    if dtype.kind == "c":
        if not isinstance(value, list) or len(value) != 2:
            return None
        parts = [_real(v, np.dtype(f"f{dtype.itemsize // 2}")) for v in value]
        return None if any(p is None for p in parts) else np.array(parts).view(dtype).reshape(())
    real = _real(value, dtype)
    return None if real is None else np.array(real, dtype).reshape(())


def _real(value: Any, dtype: DType) -> Any:
    """Returns a floating-point number from JSON; None if it is none."""
    if isinstance(value, str) and re.fullmatch(rf"0x[0-9a-fA-F]{{{2 * dtype.itemsize}}}", value):
        bits = bytes.fromhex(value[2:])
        return np.frombuffer(bits[::-1] if sys.byteorder == "little" else bits, dtype)[0]
    known = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    if isinstance(value, str) and value in known:
        return np.array(known[value]).astype(dtype)[()]
    if type(value) in (int, float):
        return np.array(float(value)).astype(dtype)[()]
    return None
