"""Test cases of NumPy's products of vectors and matrices, of operators of lines, and of `i0`."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as some

from shardtensor.testing.cases import Case, case, seed
from shardtensor.testing.layouts import array, shapes

_NUMBERS = some.sampled_from(["int64", "float32", "float64", "complex64", "complex128"])
_SIDES = some.sampled_from([0, 1, 2, 3, 5])


@case("vdot")
def _vdot(data: Any) -> Case:
    shape = data.draw(shapes(0, 3))
    x, y = [array(shape, data.draw(_NUMBERS), seed(data)) for _ in range(2)]
    return Case([x, y], answer=np.vdot(x, y))


@case("matvec")
def _matvec(data: Any) -> Case:
    m, n = data.draw(_SIDES), data.draw(_SIDES)
    x = array((*data.draw(shapes(0, 2)), m, n), data.draw(_NUMBERS), seed(data))
    y = array((n,), data.draw(_NUMBERS), seed(data))
    return Case([x, y], answer=np.matmul(x, y))


@case("vecmat")
def _vecmat(data: Any) -> Case:
    m, n = data.draw(_SIDES), data.draw(_SIDES)
    y = array((*data.draw(shapes(0, 2)), m, n), data.draw(_NUMBERS), seed(data))
    x = array((m,), data.draw(_NUMBERS), seed(data))
    return Case([x, y], answer=np.matmul(np.conj(x), y))


@case("interpolated")
def _interpolated(data: Any) -> Case:
    points = np.cumsum(np.abs(array((data.draw(some.integers(1, 6)),), "float64", seed(data))) + 1)
    values = array(points.shape, data.draw(some.sampled_from(["int32", "float64", "complex128"])), seed(data))
    ends = data.draw(some.sampled_from([(None, None), (-1.5, 7.0)]))
    x = array(data.draw(shapes()), data.draw(some.sampled_from(["int8", "float32", "float64"])), seed(data))
    arguments = tuple([end and (end, str(end)) for end in ends])
    return Case([x, points, values], arguments, answer=np.interp(x, points, values, *ends))


@case("mapped_lines")
def _mapped_lines(data: Any) -> Case:
    x = array(data.draw(shapes(1)), data.draw(_NUMBERS), seed(data))
    return Case([x], (lambda line: line * 2, x.shape[-1:], x.dtype), answer=np.asarray(x * 2))


@case("packed")
def _packed(data: Any) -> Case:
    x, little = (
        array(data.draw(shapes(1)), data.draw(some.sampled_from(["bool", "uint8", "int32"])), seed(data)),
        _order(data),
    )
    return Case([x], (little,), answer=np.packbits(x, axis=-1, bitorder="little" if little else "big"))


@case("unpacked")
def _unpacked(data: Any) -> Case:
    x, little = array(data.draw(shapes(1)), "uint8", seed(data)), _order(data)
    return Case([x], (little,), answer=np.unpackbits(x, axis=-1, bitorder="little" if little else "big"))


def _order(data: Any) -> bool:
    return bool(data.draw(some.booleans()))


@case("i0")
def _i0(data: Any) -> Case:
    dtype = data.draw(some.sampled_from(["int8", "float32", "float64"]))
    return Case([np.clip(array(data.draw(shapes()), dtype, seed(data)), -20, 20)])
