"""Functions that return copies, functions that return views, and functions that write, with operands of every kind.

Each entry is called with NumPy and a NumPy array, and with the library and a tensor. An array is ``x``, a view of a base
of two dimensions; NumPy says whether a result is a view of the base, and what a write does to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[Any, Any], Any]


OPERANDS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda b: b,
    "slice": lambda b: b[1:-1],
    "slice of a slice": lambda b: b[1:-1][1:],
    "columns": lambda b: b[:, 1:-1],
    "transposed": lambda b: b.T,
    "reversed": lambda b: b[::-1],
    "reversed columns": lambda b: b[:, ::-1],
    "strided": lambda b: b[:, ::2],
    "strided rows": lambda b: b[::2],
    "transposed slice": lambda b: b[1:-1].T,
    "slice of transposed": lambda b: b.T[1:-1, 1:],
    "reshaped": lambda b: b.reshape(b.shape[1], b.shape[0]),
    "reshaped slice": lambda b: b[1:-1].reshape(-1, 2),
    "row": lambda b: b[1],
    "column": lambda b: b[:, 1],
    "flat slice": lambda b: b.reshape(-1)[3:-3],
    "flat reversed": lambda b: b.reshape(-1)[::-1],
    "new dimension": lambda b: b[None],
    "three dimensions": lambda b: b.reshape(2, -1, b.shape[1]),
    "three dimensions, transposed": lambda b: b.reshape(2, -1, b.shape[1]).transpose(1, 0, 2),
    "three dimensions, turned": lambda b: b.reshape(2, -1, b.shape[1]).transpose(2, 0, 1)[::-1, :, ::2],
    "three dimensions, sliced": lambda b: b.reshape(2, -1, b.shape[1])[:, 1],
    "bits": lambda b: b.view("i8"),
    "bits, transposed": lambda b: b.T[1:].view("i8"),
    "real": lambda b: b.real,
    "imag of a slice": lambda b: b[1:-1].imag,
    "real, transposed": lambda b: b.T.real,
    "real, reversed": lambda b: b.real[::-1],
    "real, row": lambda b: b[1].real,
    "broadcast": lambda b: np.broadcast_to(b[1], (3, b.shape[1])),
    "empty": lambda b: b[:0],
    "no dimensions": lambda b: b[1, 1, ...],
    "one row": lambda b: b[1:2],
    "one element": lambda b: b[1:2, 1:2],
}
"""The operands as views of a base. Those whose names begin with a part of complex numbers have a complex base."""


def _every(x: Any) -> Any:
    """Returns the numbers of all elements, in the shape of x."""
    return np.arange(x.size).reshape(x.shape)


def _values(x: Any) -> Any:
    """Returns values of the shape of x."""
    return -100.0 - _every(x)


def _eye(n: int) -> Any:
    """Returns a unit matrix, unless it would be large."""
    return np.eye(n) if n < 300 else 1 / 0


RESULTS: dict[str, Call] = {
    # Copies of whole arrays.
    "flatten": lambda xp, x: x.flatten(),
    "flatten F": lambda xp, x: x.flatten("F"),
    "x.copy": lambda xp, x: x.copy(),
    "copy": lambda xp, x: np.copy(x),
    "copy.copy": lambda xp, x: copy.copy(x),
    "copy.deepcopy": lambda xp, x: copy.deepcopy(x),
    "astype": lambda xp, x: x.astype(x.dtype),
    "astype copy=False": lambda xp, x: x.astype(x.dtype, copy=False),
    "xp.astype": lambda xp, x: xp.astype(x, x.dtype),
    "asarray copy": lambda xp, x: xp.asarray(x, copy=True),
    "asarray": lambda xp, x: xp.asarray(x),
    "asarray dtype": lambda xp, x: xp.asarray(x, dtype=x.dtype),
    "repeat 1": lambda xp, x: np.repeat(x, 1),
    "repeat 1, axis": lambda xp, x: np.repeat(x, 1, axis=0),
    "x.repeat 1": lambda xp, x: x.repeat(1),
    "repeat, list": lambda xp, x: np.repeat(x, [1] * len(x), axis=0),
    "tile 1": lambda xp, x: np.tile(x, 1),
    "tile (1, 1, 1)": lambda xp, x: np.tile(x, (1, 1, 1)),
    "resize": lambda xp, x: np.resize(x, x.shape),
    "resize, fewer": lambda xp, x: np.resize(x, 3),
    "reshape copy": lambda xp, x: xp.reshape(x, (-1,), copy=True),
    "reshape copy, same": lambda xp, x: xp.reshape(x, x.shape, copy=True),
    "roll 0": lambda xp, x: np.roll(x, 0),
    "roll 0, axis": lambda xp, x: np.roll(x, 0, axis=0),
    "concatenate one": lambda xp, x: np.concatenate([x]),
    "concatenate one, flat": lambda xp, x: np.concatenate([x], axis=None),
    "concatenate empty": lambda xp, x: np.concatenate([x, x[:0]]),
    "concatenate parts": lambda xp, x: np.concatenate(np.split(x, [1])),
    "stack one": lambda xp, x: np.stack([x]),
    "vstack one": lambda xp, x: np.vstack([x]),
    "hstack one": lambda xp, x: np.hstack([x]),
    "dstack one": lambda xp, x: np.dstack([x]),
    "column_stack one": lambda xp, x: np.column_stack([x]),
    "block one": lambda xp, x: np.block([x]),
    "append nothing": lambda xp, x: np.append(x, x[:0], axis=0),
    "append nothing, flat": lambda xp, x: np.append(x, []),
    "take all": lambda xp, x: np.take(x, np.arange(len(x)), axis=0),
    "take all, flat": lambda xp, x: np.take(x, np.arange(x.size)),
    "x.take": lambda xp, x: x.take([0, 1], axis=0),
    "take_along_axis": lambda xp, x: np.take_along_axis(x, _every(x) * 0, axis=0),
    "compress all": lambda xp, x: np.compress([True] * len(x), x, axis=0),
    "extract all": lambda xp, x: np.extract(np.ones(x.shape, bool), x),
    "delete nothing": lambda xp, x: np.delete(x, [], axis=0),
    "delete nothing, slice": lambda xp, x: np.delete(x, slice(0, 0), axis=0),
    "delete nothing, flat": lambda xp, x: np.delete(x, []),
    "insert nothing": lambda xp, x: np.insert(x, [], 1.0, axis=0),
    "insert nothing, flat": lambda xp, x: np.insert(x, [], 1.0),
    "pad 0": lambda xp, x: np.pad(x, 0),
    "pad 0, edge": lambda xp, x: np.pad(x, 0, "edge"),
    "sort": lambda xp, x: np.sort(x),
    "sort, flat": lambda xp, x: np.sort(x, axis=None),
    "sort, axis": lambda xp, x: np.sort(x, axis=0),
    "mask": lambda xp, x: x[np.ones(x.shape, bool)],
    "index array": lambda xp, x: x[np.arange(len(x))],
    "index list": lambda xp, x: x[[0]],
    "positive": lambda xp, x: +x,
    "multiply": lambda xp, x: x * 1,
    "abs": lambda xp, x: np.abs(x),
    "conj": lambda xp, x: np.conj(x),
    "x.conj": lambda xp, x: x.conj(),
    "x.conjugate": lambda xp, x: x.conjugate(),
    "round": lambda xp, x: np.round(x),
    "clip": lambda xp, x: np.clip(x, None, 1e9),
    "where": lambda xp, x: np.where(True, x, x),
    "choose": lambda xp, x: np.choose(0, [x]),
    "select": lambda xp, x: np.select([x == x], [x]),
    "nan_to_num": lambda xp, x: np.nan_to_num(x),
    "nan_to_num copy=False": lambda xp, x: np.nan_to_num(x, copy=False),
    "real_if_close": lambda xp, x: np.real_if_close(x),
    "tril": lambda xp, x: np.tril(x, 1000),
    "triu": lambda xp, x: np.triu(x, -1000),
    "fix": lambda xp, x: np.fix(x),
    "ldexp": lambda xp, x: np.ldexp(x, 0),
    "meshgrid": lambda xp, x: np.meshgrid(x.ravel())[0],
    "full_like": lambda xp, x: np.full_like(x, x),
    "convolve": lambda xp, x: np.convolve(x.reshape(-1), [1.0]),
    "matmul": lambda xp, x: x @ _eye(x.shape[-1]),
    "flat[:]": lambda xp, x: x.flat[:],
    "flat.copy": lambda xp, x: x.flat.copy(),
    "reduceat": lambda xp, x: np.add.reduceat(x, np.arange(len(x)), axis=0),
    # Reductions and scans of one element.
    **{
        f"{name} of one": lambda xp, x, name=name: getattr(np, name)(x[:1], axis=0)
        for name in ("sum", "prod", "max", "mean", "median", "average", "nansum", "nanmax", "cumsum")
    },
    "add.reduce of one": lambda xp, x: np.add.reduce(x[:1], axis=0),
    "maximum.accumulate of one": lambda xp, x: np.maximum.accumulate(x[:1], axis=0),
    # Views, and copies where the strides permit none.
    "itself": lambda xp, x: x,
    "x[1:]": lambda xp, x: x[1:],
    "x[None]": lambda xp, x: x[None],
    "x[...]": lambda xp, x: x[...],
    "squeeze": lambda xp, x: np.squeeze(x),
    "ravel": lambda xp, x: np.ravel(x),
    "x.ravel": lambda xp, x: x.ravel(),
    "x.ravel F": lambda xp, x: x.ravel("F"),
    "ravel or copy": lambda xp, x: x.ravel() if x.flags.c_contiguous else x.flatten(),
    "reshape -1": lambda xp, x: x.reshape(-1),
    "reshape, same": lambda xp, x: x.reshape(x.shape),
    "reshape, leading": lambda xp, x: x.reshape((1, *x.shape)),
    "reshape F": lambda xp, x: np.reshape(x, -1, order="F"),
    "reshape 2": lambda xp, x: x.reshape(2, -1),
    "reshape 2, row": lambda xp, x: x.reshape(2, -1)[0],
    "reshape 2, row, ravel": lambda xp, x: x.reshape(2, -1)[0].ravel(),
    "reshape 2, T": lambda xp, x: x.reshape(2, -1).T,
    "reshape 2, T, copy": lambda xp, x: x.reshape(2, -1).T.copy(),
    "reshape 2, T, reshape": lambda xp, x: x.reshape(2, -1).T.reshape(-1),
    "T": lambda xp, x: x.T,
    "mT": lambda xp, x: x.mT,
    "T.copy": lambda xp, x: x.T.copy(),
    "T.flatten": lambda xp, x: x.T.flatten(),
    "T.ravel": lambda xp, x: x.T.ravel(),
    "T.T.ravel": lambda xp, x: x.T.T.ravel(),
    "T.reshape.T": lambda xp, x: x.T.reshape(x.T.shape).T,
    "T[1:].ravel": lambda xp, x: x.T[1:].ravel(),
    "T[1:].flatten F": lambda xp, x: x.T[1:].flatten("F"),
    "[1:].ravel": lambda xp, x: x[1:].ravel(),
    "[1:-1].ravel": lambda xp, x: x[1:-1].ravel(),
    "[1:].flatten": lambda xp, x: x[1:].flatten(),
    "[1:].reshape": lambda xp, x: x[1:].reshape(-1),
    "[::-1].ravel": lambda xp, x: x[::-1].ravel(),
    "[..., ::2].ravel": lambda xp, x: x[..., ::2].ravel(),
    "[..., :1].ravel": lambda xp, x: x[..., :1].ravel(),
    "[None].ravel": lambda xp, x: x[None].ravel(),
    "[..., None].reshape": lambda xp, x: x[..., None].reshape(-1),
    "[1:].copy": lambda xp, x: x[1:].copy(),
    "[1:].T": lambda xp, x: x[1:].T,
    "[1:].astype": lambda xp, x: x[1:].astype(x.dtype),
    "[1:], asarray": lambda xp, x: xp.asarray(x[1:]),
    "[1:], asarray copy": lambda xp, x: xp.asarray(x[1:], copy=True),
    "[1:], repeat": lambda xp, x: np.repeat(x[1:], 1),
    "[1:], roll": lambda xp, x: np.roll(x[1:], 0),
    "[1:], concatenate": lambda xp, x: np.concatenate([x[1:]]),
    "[1:], resize": lambda xp, x: np.resize(x[1:], 2),
    "[1:], tile": lambda xp, x: np.tile(x[1:], 1),
    "[1:], reshape copy": lambda xp, x: xp.reshape(x[1:], x[1:].shape, copy=True),
    "[1:], sort": lambda xp, x: np.sort(x[1:]),
    "[1:], pad": lambda xp, x: np.pad(x[1:], 0),
    "[1:], delete": lambda xp, x: np.delete(x[1:], [], axis=0),
    "[1:], insert": lambda xp, x: np.insert(x[1:], [], 1.0, axis=0),
    "[1:], take": lambda xp, x: np.take(x[1:], np.arange(len(x) - 1), axis=0),
    "[1:], compress": lambda xp, x: np.compress([True] * (len(x) - 1), x[1:], axis=0),
    "swapaxes": lambda xp, x: np.swapaxes(x, 0, -1),
    "swapaxes, ravel": lambda xp, x: np.swapaxes(x, 0, -1).ravel(),
    "moveaxis": lambda xp, x: np.moveaxis(x, 0, -1),
    "rollaxis": lambda xp, x: np.rollaxis(x, -1),
    "permute_dims": lambda xp, x: xp.permute_dims(x, tuple(range(x.ndim))),
    "expand_dims": lambda xp, x: np.expand_dims(x, 0),
    "atleast_2d": lambda xp, x: np.atleast_2d(x),
    "atleast_3d": lambda xp, x: np.atleast_3d(x),
    "flip": lambda xp, x: np.flip(x),
    "flip, axis": lambda xp, x: np.flip(x, 0),
    "fliplr": lambda xp, x: np.fliplr(x),
    "rot90": lambda xp, x: np.rot90(x),
    "rot90, none": lambda xp, x: np.rot90(x, 0),
    "rot90, twice": lambda xp, x: np.rot90(x, 2),
    "split": lambda xp, x: np.split(x, [1])[1],
    "split, copy": lambda xp, x: np.split(x, [1])[1].copy(),
    "array_split": lambda xp, x: np.array_split(x, 1)[0],
    "hsplit": lambda xp, x: np.hsplit(x, [1])[0],
    "unstack": lambda xp, x: xp.unstack(x)[0],
    "x.real": lambda xp, x: x.real,
    "real": lambda xp, x: np.real(x),
    "real, ravel": lambda xp, x: x.real.ravel(),
    "real of a copy": lambda xp, x: x.astype(complex).real,
    "view": lambda xp, x: x.view("i8"),
    "view, same": lambda xp, x: x.view(),
    "view, copy": lambda xp, x: x.view("i8").copy(),
    "view, ravel": lambda xp, x: x.view("i8").ravel(),
    "einsum": lambda xp, x: np.einsum("...->...", x),
    "einsum, transposed": lambda xp, x: np.einsum("ij->ji", x),
}  # fmt: skip
"""Functions that return an array."""


def _through(view: Callable[[Any], Any], value: float = -1.0) -> Call:
    """Returns a function that writes to a view of x, or to a copy of it."""

    def write(xp: Any, x: Any) -> None:
        view(x)[...] = value

    return write


def _at(index: Any, value: Any = -1.0) -> Call:
    """Returns a function that writes to elements."""
    return lambda xp, x: x.__setitem__(index(x) if callable(index) else index, value)


def _flat(index: Any, value: Any) -> Call:
    """Returns a function that writes to elements by their numbers."""
    return lambda xp, x: x.flat.__setitem__(index, value)


def _along_flat(xp: Any, x: Any, index: Any, values: Any) -> None:
    """Writes by `put_along_axis` to a flattened array, which NumPy refuses unless the array is contiguous."""
    if xp is np:
        x.flat[index] = values
    else:
        np.put_along_axis(x, index, values, axis=None)


def _thirds(x: Any) -> Any:
    return _every(x) % 3 == 0


WRITES: dict[str, Call] = {
    "fill_diagonal": lambda xp, x: np.fill_diagonal(x, -1.0),
    "fill_diagonal, list": lambda xp, x: np.fill_diagonal(x, [-1.0, -2.0]),
    "fill_diagonal, array": lambda xp, x: np.fill_diagonal(x, np.arange(3.0)),
    "fill_diagonal, wrap": lambda xp, x: np.fill_diagonal(x, -1.0, wrap=True),
    "fill_diagonal, list, wrap": lambda xp, x: np.fill_diagonal(x, [-1.0, -2.0, -3.0], wrap=True),
    "fill_diagonal, T": lambda xp, x: np.fill_diagonal(x.T, [-1.0, -2.0]),
    "fill_diagonal, T, wrap": lambda xp, x: np.fill_diagonal(x.T, [-1.0, -2.0], wrap=True),
    "fill_diagonal, [::-1]": lambda xp, x: np.fill_diagonal(x[::-1], -1.0),
    "put_along_axis, flat": lambda xp, x: _along_flat(xp, x, np.array([1, -2, 0]), -1.0),
    "put_along_axis, flat, array": lambda xp, x: _along_flat(xp, x, np.array([1, 3, 0]), np.array([-1.0, -2.0, -3.0])),
    "put_along_axis, first": lambda xp, x: np.put_along_axis(x, np.zeros((1, *x.shape[1:]), int), -1.0, axis=0),
    "put_along_axis, last": lambda xp, x: np.put_along_axis(x, np.zeros((*x.shape[:-1], 1), int), -1.0, axis=-1),
    "put": lambda xp, x: np.put(x, [1, 3, 0], [-1.0, -2.0, -3.0]),
    "put, T": lambda xp, x: np.put(x.T, [0, 2], [-1.0, -2.0]),
    "put, clip": lambda xp, x: np.put(x, [1, 10**7, 0], [-1.0, -2.0], mode="clip"),
    "x.put": lambda xp, x: x.put([1, 3, 0], [-1.0, -2.0, -3.0]),
    "place": lambda xp, x: np.place(x, _thirds(x), [-1.0, -2.0]),
    "putmask": lambda xp, x: np.putmask(x, _thirds(x), [-1.0, -2.0]),
    "putmask, T": lambda xp, x: np.putmask(x.T, _thirds(x.T), [-1.0, -2.0]),
    "copyto": lambda xp, x: np.copyto(x, -1.0),
    "copyto, array": lambda xp, x: np.copyto(x, _values(x)),
    "copyto, where": lambda xp, x: np.copyto(x, -1.0, where=_thirds(x)),
    "copyto, T": lambda xp, x: np.copyto(x.T, -1.0),
    "copyto, ravel": lambda xp, x: np.copyto(x.ravel(), -1.0),
    "flat[0]": _flat(0, -1.0),
    "flat[-1]": _flat(-1, -1.0),
    "flat[1:3]": _flat(slice(1, 3), [-1.0, -2.0]),
    "flat[::-2]": _flat(slice(None, None, -2), -1.0),
    "flat[:4], repeated": _flat(slice(0, 4), [-1.0, -2.0, -3.0]),
    "flat[list]": _flat([0, 2], [-1.0, -2.0, -3.0]),
    "flat[...]": _flat(..., [-1.0, -2.0]),
    "flat =": lambda xp, x: setattr(x, "flat", -1.0),
    "flat =, list": lambda xp, x: setattr(x, "flat", [-1.0, -2.0]),
    "flat =, array": lambda xp, x: setattr(x, "flat", _values(x)),
    "add.at": lambda xp, x: np.add.at(x, [0, 0], 1.0),
    "add.at, T": lambda xp, x: np.add.at(x.T, [0, 0, 1], 1.0),
    "add.at, one": lambda xp, x: np.add.at(x, tuple([0] * x.ndim), 1.0),
    "add.at, two": lambda xp, x: np.add.at(x, ([0, 0], [1, 1]), [1.0, 2.0]),
    "negative.at": lambda xp, x: np.negative.at(x, [0]),
    "maximum.at": lambda xp, x: np.maximum.at(x, [0, 1], 20.0),
    "out=": lambda xp, x: np.multiply(x, 2.0, out=x),
    "out= of others": lambda xp, x: np.add(_values(x), 1.0, out=x),
    "out=, where": lambda xp, x: np.add(x, 1.0, out=x, where=_thirds(x)),
    "out= T": lambda xp, x: np.add(x.T, 1.0, out=x.T),
    "out= reshape": lambda xp, x: np.add(1.0, _values(x).reshape(-1), out=x.reshape(-1)),
    "out= ravel": lambda xp, x: np.add(x.ravel(), 1.0, out=x.ravel()),
    "out=, reversed operand": lambda xp, x: np.add(x, x[::-1], out=x),
    "divmod out=": lambda xp, x: np.divmod(_values(x), 7.0, out=(x, None)),
    "modf out=": lambda xp, x: np.modf(_values(x) + 0.5, out=(None, x)),
    "cumsum out=": lambda xp, x: np.cumsum(x, axis=0, out=x),
    "cumsum out= T": lambda xp, x: np.cumsum(_values(x.T), axis=0, out=x.T),
    "sum out=": lambda xp, x: np.sum(_values(x), axis=0, out=x[0, ...]),
    "sum out=, one": lambda xp, x: np.sum(_values(x), out=x.reshape(-1)[1:2].reshape(())),
    "max out=": lambda xp, x: np.max(_values(x), axis=0, out=x[0, ...]),
    "mean out=": lambda xp, x: np.mean(_values(x), axis=0, out=x[0, ...]),
    "median out=": lambda xp, x: np.median(_values(x), axis=0, out=x[0, ...]),
    "quantile out=": lambda xp, x: np.quantile(_values(x), 0.5, axis=0, out=x[0, ...]),
    "std out=": lambda xp, x: np.std(_values(x), axis=0, out=x[0, ...]),
    "add.reduce out=": lambda xp, x: np.add.reduce(_values(x), axis=0, out=x[0, ...]),
    "add.accumulate out=": lambda xp, x: np.add.accumulate(x, axis=0, out=x),
    "multiply.outer out=": lambda xp, x: np.multiply.outer(np.arange(float(len(x))), np.ones(x.shape[1:]), out=x),
    "clip out=": lambda xp, x: np.clip(x, 1.0, 2.0, out=x),
    "clip out= reversed": lambda xp, x: x[::-1].clip(0.0, 3.0, out=x[::-1]),
    "round out=": lambda xp, x: np.round(x, out=x),
    "take out=": lambda xp, x: np.take(_values(x), _every(x), out=x),
    "choose out=": lambda xp, x: np.choose(0, [_values(x)], out=x),
    "compress out=": lambda xp, x: np.compress([True] * len(x), _values(x), axis=0, out=x),
    "concatenate out=": lambda xp, x: np.concatenate([_values(x)], out=x),
    "concatenate out= T": lambda xp, x: np.concatenate([_values(x.T)], out=x.T),
    "stack out=": lambda xp, x: np.stack([_values(x)[0]] * len(x), out=x),
    "matmul out=": lambda xp, x: np.matmul(x, _eye(x.shape[-1]), out=x),
    "matmul out= T": lambda xp, x: np.matmul(_values(x.T), _eye(x.shape[0]), out=x.T),
    "einsum out=": lambda xp, x: np.einsum("...->...", _values(x), out=x),
    "nan_to_num": lambda xp, x: np.nan_to_num(x, copy=False, nan=-1.0),
    "x.sort": lambda xp, x: x.sort(),
    "x.sort, axis": lambda xp, x: x.sort(axis=0),
    "x.sort, T": lambda xp, x: x.T.sort(axis=0),
    "x.sort, [::-1]": lambda xp, x: x[::-1].sort(axis=0),
    "x.sort, ravel": lambda xp, x: x.ravel().sort(),
    "x.partition": lambda xp, x: x[..., :9].partition(tuple(range(min(9, x.shape[-1])))),
    "fill": lambda xp, x: x.fill(-1.0),
    "real =": lambda xp, x: setattr(x, "real", 5.0),
    "real of a slice": _through(lambda x: x[1:].real),
    "imag of a copy": _through(lambda x: x.astype(complex).imag),
    "T": _through(lambda x: x.T),
    "ravel": _through(lambda x: x.ravel()),
    "np.ravel": _through(np.ravel),
    "T.ravel": _through(lambda x: x.T.ravel()),
    "T.T.ravel": _through(lambda x: x.T.T.ravel()),
    "reshape": _through(lambda x: x.reshape(-1)),
    "reshape F": _through(lambda x: x.reshape(-1, order="F")),
    "reshape 2, row": _through(lambda x: x.reshape(2, -1)[0]),
    "reshape 2, T": _through(lambda x: x.reshape(2, -1).T[1:]),
    "flatten": _through(lambda x: x.flatten()),
    "[1:].ravel": _through(lambda x: x[1:].ravel()),
    "[..., ::2].ravel": _through(lambda x: x[..., ::2].ravel()),
    "[::-1].reshape": _through(lambda x: x[::-1].reshape(-1)),
    "flip": _through(np.flip),
    "squeeze": _through(np.squeeze),
    "split": _through(lambda x: np.split(x, [1])[1]),
    "bits of a slice": _through(lambda x: x.view("i8")[1:], -1),
    "+=": lambda xp, x: x.__iadd__(1),
    "mask": _at(_thirds),
    "mask of rows": _at(lambda x: np.arange(len(x)) % 2 == 0),
    "mask, T": lambda xp, x: x.T.__setitem__(_thirds(x.T), -1.0),
    "index array": _at(np.array([0, 1])),
    "index array, twice": lambda xp, x: x.__setitem__([0, 0], _values(x)[:2]),
    "ix_": _at(np.ix_([0, 1], [1])),
    "reversed itself": lambda xp, x: x.__setitem__(..., x[::-1]),
    "shifted itself": lambda xp, x: x.__setitem__(slice(1, None), x[:-1]),
    "flat, shifted": lambda xp, x: x.reshape(-1).__setitem__(slice(1, None), x.reshape(-1)[:-1]),
    "flat, reversed": lambda xp, x: x.__setitem__(..., x.reshape(-1)[::-1].reshape(x.shape)),
}
"""Functions that write to x, or to a copy of it."""


def _write_around(take: Callable[[Any], Any]) -> Call:
    """Returns a function that takes a view or a copy of x, writes to x, and then writes what it took to x."""

    def write(xp: Any, x: Any) -> None:
        taken = take(x)
        x[...] = x + 3.0
        x[1:] = taken.reshape(x.shape)[:-1] + 1

    return write


WRITES |= {
    f"{name} around a write": _write_around(take)
    for name, take in {
        "x[...]": lambda x: x[...],
        "copy": lambda x: x.copy(),
        "flatten": lambda x: x.flatten(),
        "ravel": lambda x: x.ravel(),
        "reshape": lambda x: x.reshape(-1),
        "repeat": lambda x: np.repeat(x, 1),
    }.items()
}
