"""The tests of arrays: transfers from and to the host, views, memory order, and the backend's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import HostArray
from shardtensor.testing.base import Kit
from shardtensor.testing.indexing_cases import indices
from shardtensor.testing.layouts import DTYPES, array, shapes

FROM_HOST = "Backend.from_host: a copy of the host array, which may be written afterwards"
ROUND_TRIP = "Backend.from_host and to_host: the same values, shape and dtype after a round trip"
VIEW = "Backend.view: the elements at a basic index, as in NumPy"
SHARES = "Backend.view is a view: writes to it are visible in the array"
NEGATIVE = "Backend.negative_strides: whether a slice with a negative step is a view"
CONTIGUOUS = "Backend.contiguous: the array itself if it is in row-major order, else a copy in row-major order"
IS_CONTIGUOUS = "Backend.is_contiguous: whether an array is in row-major order, so that reshaping it gives a view"
NAMESPACE = "Backend.xp: an array-API namespace; like NumPy where the standard leaves a choice"
INDEXING = "arrays support index arrays, and assignment to slices, index arrays and masks"

HOSTS: dict[str, Callable[[HostArray], HostArray]] = {
    "in row-major order": lambda a: a,
    "in column-major order": np.asfortranarray,
    "transposed": lambda a: a.T,
    "strided": lambda a: a[::2, 1::2],
    "reversed": lambda a: a[::-1, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "of no elements": lambda a: a[:0],
    "of no dimensions": lambda a: a[1, 2],
    "a row": lambda a: a[1],
}


class ArrayTests(Kit):
    """A backend's arrays have the same elements as NumPy's, and their views share memory."""

    # -- transfers from and to the host ------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [*DTYPES, "int16", "uint16", "uint32", "uint64"])
    def test_host_round_trip(self, dtype: str) -> None:
        """Arrays survive a round trip to every device, for every dtype of the backend and shapes of all kinds."""
        if not self.it.has_dtype(np.dtype(dtype)):
            pytest.skip(f"backend {self.backend!r} has no {dtype}")
        for device in self.devices:
            for shape in [(), (1,), (7,), (0,), (3, 0, 2), (2, 3, 4)]:
                host = array(shape, dtype, 3)
                x = self.put(host, device)
                self.same(self.get(x, device), host, ROUND_TRIP, f"on {device}")
                self.must(self.it.is_array(x), "Backend.is_array: whether it is one of this backend's arrays", type(x))
                result = self.it.dtype_of(x)
                right = isinstance(result, np.dtype) and result == np.dtype(dtype)
                self.must(right, "Backend.dtype_of: the NumPy dtype of the elements", f"{result!r} of {dtype}")
                known = tuple(x.shape), x.ndim, int(x.nbytes)
                self.must(known == (shape, len(shape), host.nbytes), "arrays have shape, ndim and nbytes", known)

    def test_unsupported_dtypes(self) -> None:
        """A host array of an unsupported dtype raises an ArgumentTypeError that names the dtype."""
        for dtype in set(DTYPES) - set(self.dtypes):
            with pytest.raises(st.ArgumentTypeError, match=dtype):
                st.device_put(np.zeros(3, dtype), self.devices[0])

    @pytest.mark.parametrize("layout", HOSTS)
    def test_host_arrays_of_any_layout(self, layout: str) -> None:
        """`from_host` accepts host arrays of any strides, read-only ones included."""
        host = HOSTS[layout](self.numbers(48).reshape(6, 8))
        for writable in (True, False):
            view = np.asarray(host).view()
            view.flags.writeable = view.flags.writeable and writable
            self.same(
                self.get(self.put(view, self.devices[-1]), self.devices[-1]), host, ROUND_TRIP, f"of an array {layout}"
            )

    def test_from_host_copies(self) -> None:
        """A host array and its copy on a device are independent.

        The host array is overwritten immediately after `from_host`, and is large enough for the copy to take a while.
        """
        for device in self.devices:
            hosts = [self.numbers(self.size * n) for n in (1, 4, 16)]
            answers = [h.copy() for h in hosts]
            arrays = [self.put(h, device) for h in hosts]
            for host in hosts:
                host[...] = 0
            for x, right in zip(arrays, answers, strict=True):
                self.same(self.get(x, device), right, FROM_HOST)
                self.write(x, 5, device)
            self.must(not any(h.any() for h in hosts), FROM_HOST, "writing to the array wrote to the host array")

    def test_is_array(self) -> None:
        """`is_array` is false for Python objects, and for host arrays unless the backend shares the host's memory."""
        for x in (None, 1, 2.5, "text", [1, 2], object()):
            self.must(not self.it.is_array(x), "Backend.is_array: whether it is one of this backend's arrays", repr(x))
        if not self.it.on_host:
            answer = self.it.is_array(np.ones(3))
            self.must(not answer, "Backend.is_array: NumPy's arrays are the host's, unless on_host is set", answer)

    def test_scalars_become_arrays(self) -> None:
        """`asarray` converts whatever `is_array` accepts to an array: a full sum may be an array scalar."""
        device, host = self.devices[0], self.numbers(9)
        x = self.put(host, device)
        with self.it.on(device):
            total = self.it.xp.sum(x)
            result = self.it.asarray(total)
            self.must(
                self.it.is_array(total) and self.it.is_array(result), "Backend.asarray gives an array", type(result)
            )
            self.must(result.ndim == 0, "Backend.asarray: array scalars become 0-d arrays", result.ndim)
            result = self.it.xp.asarray(result, dtype=np.dtype(self.dtype))
        self.same(self.get(result, device), host.sum(dtype=host.dtype), NAMESPACE, "sum")

    # -- views and memory order --------------------------------------------------------------------

    def test_views_have_numpys_elements(self) -> None:
        """`view` selects the same elements as NumPy for integers, slices with any step, None and Ellipsis."""

        def one(data: Any) -> None:
            host = self.numbers(1 if not (shape := data.draw(shapes())) else int(np.prod(shape))).reshape(shape)
            index = data.draw(indices(host.shape))
            x = self.put(host, self.devices[0])
            with self.it.on(self.devices[0]):
                part = self.it.asarray(self.it.view(x, index))
            self.same(self.get(part, self.devices[0]), host[index], VIEW, f"[{index!r}] of shape {shape}")

        self.sweep(one, 4 * self.examples)

    def test_views_share_memory(self) -> None:
        """Writes to a view are visible in the array; for negative steps only if `negative_strides` is set."""

        def one(data: Any) -> None:
            host = self.numbers(int(np.prod(shape := data.draw(shapes(1))))).reshape(shape)
            index = data.draw(indices(host.shape))
            entries = index if isinstance(index, tuple) else (index,)
            reversed_ = any(isinstance(e, slice) and e.step is not None and e.step < 0 for e in entries)
            if host[index].ndim == 0 or (reversed_ and not self.it.negative_strides):
                return
            x = self.put(host, self.devices[0])
            with self.it.on(self.devices[0]):
                part = self.it.view(x, index)
            self.write(part, 0, self.devices[0])
            host[index] = 0
            rule = NEGATIVE if reversed_ else SHARES
            self.same(self.get(x, self.devices[0]), host, rule, f"after writing to [{index!r}] of shape {shape}")

        self.sweep(one, 4 * self.examples)

    def test_contiguous(self) -> None:
        """`contiguous` returns the array itself if it is in row-major order, else a copy."""
        device, host = self.devices[-1], self.numbers(24).reshape(4, 6)
        for name, cut in self._cuts().items():
            x, y = self.put(host, device), host.copy()
            with self.it.on(device):
                part, right = cut(self.it, x), cut(np, y)
                already = self.it.is_contiguous(part)
                copy = self.it.contiguous(part)
                self.must(self.it.is_contiguous(copy), CONTIGUOUS, f"is_contiguous is false for contiguous({name})")
            self.same(self.get(copy, device), right, CONTIGUOUS, name)
            self.write(copy, 0, device)
            if already:
                right[...] = 0
            self.same(self.get(x, device), y, CONTIGUOUS, f"the array, after writing to contiguous({name})")

    def test_is_contiguous(self) -> None:
        """If `is_contiguous` is true, the reshaped array is a view."""
        device, host = self.devices[0], self.numbers(24).reshape(4, 6)
        for name, cut in self._cuts().items():
            x, y = self.put(host, device), host.copy()
            with self.it.on(device):
                part, right = cut(self.it, x), cut(np, y)
                answer = self.it.is_contiguous(part)
                self.must(right.flags.c_contiguous or not answer, IS_CONTIGUOUS, f"{answer} for {name}")
                flat = self.it.xp.reshape(part, (-1,))
            if answer:
                self.write(flat, 0, device)
                right.reshape(-1)[...] = 0
                self.same(self.get(x, device), y, IS_CONTIGUOUS, f"the array, after writing to {name}, reshaped")

    def _cuts(self) -> dict[str, Callable[[Any, Any], Any]]:
        """Returns functions that make views of a two-dimensional array, by a backend or by NumPy."""

        def view(index: Any) -> Callable[[Any, Any], Any]:
            return lambda it, x: x[index] if it is np else it.view(x, index)

        return {
            "the array": lambda it, x: x,
            "a few rows": view(slice(1, 3)),
            "a few columns": view((slice(None), slice(1, 3))),
            "every other row": view(slice(None, None, 2)),
            "the transposed array": lambda it, x: x.T if it is np else it.xp.permute_dims(x, (1, 0)),
        }

    # -- functions ---------------------------------------------------------------------------------

    def test_namespace(self) -> None:
        """`xp` accepts NumPy's extensions of the standard: NumPy dtypes, Python scalars, ``out=`` and ``copy=``."""
        device, host, xp = self.devices[0], self.numbers(6), self.it.xp
        float_name = next(d for d in ("float64", "float32") if d in self.dtypes)
        x, kept = self.put(host, device), self.put(host, device)
        with self.it.on(device):
            results = {
                "x + 1": (xp.add(x, 1), host + 1),
                "2 * x": (xp.multiply(2, x), 2 * host),
                "asarray(x, dtype)": (xp.asarray(x, dtype=np.dtype(float_name)), host.astype(float_name)),
                "zeros(shape, dtype)": (
                    xp.zeros((2, 0, 3), dtype=np.dtype(float_name)),
                    np.zeros((2, 0, 3), float_name),
                ),
                "reshape": (xp.reshape(x, (2, 3)), host.reshape(2, 3)),
                "permute_dims": (xp.permute_dims(xp.reshape(x, (2, 3)), (1, 0)), host.reshape(2, 3).T),
                "concat": (xp.concat([x, x]), np.concatenate([host, host])),
                "where": (xp.where(xp.greater(x, 3), x, 0), np.where(host > 3, host, 0)),
            }
            empty = xp.empty((2, 3), dtype=np.dtype(float_name))
        self.must(tuple(empty.shape) == (2, 3), NAMESPACE, f"empty((2, 3)) has shape {empty.shape}")
        for name, (result, right) in results.items():
            self.same(self.get(result, device), right, NAMESPACE, name)
        with self.it.on(device):
            copy = xp.asarray(kept, copy=True)
            xp.add(kept, 10, out=kept)
        self.same(self.get(kept, device), host + 10, NAMESPACE, "add(x, 10, out=x): out= may be an operand")
        self.same(self.get(copy, device), host, NAMESPACE, "asarray(x, copy=True), after x was written")

    def test_indexing(self) -> None:
        """Arrays support reading and assignment with index arrays and masks."""
        device, host = self.devices[0], self.numbers(6)
        where, mask = np.array([4, 0, 2]), np.array([True, False, True, False, False, True])
        x, at, among = (self.put(v, device) for v in (host, where, mask))
        with self.it.on(device):
            taken = x[at]
            x[at] = taken + 1
            x[among] = 0
            x[1:5:3] = 50
        self.same(self.get(taken, device), host[where], INDEXING, "x[index array]")
        host[where] += 1
        host[mask] = 0
        host[1:5:3] = 50
        self.same(self.get(x, device), host, INDEXING, "after assignments")

    def test_real_and_imag(self) -> None:
        """Complex arrays have attributes ``real`` and ``imag``."""
        if "complex64" not in self.dtypes:
            pytest.skip(f"backend {self.backend!r} has no complex64")
        device, host = self.devices[0], array((5,), "complex64", 1)
        x = self.put(host, device)
        with self.it.on(device):
            parts = x.real, x.imag
        for part, right in zip(parts, (host.real, host.imag), strict=True):
            self.same(self.get(part, device), right, "arrays have real and imag")

    def test_export(self) -> None:
        """`export` returns an array of the backend with the same values."""
        for device in self.devices:
            x, answer = self.worked(device, self.numbers(10))
            with self.it.on(device):
                view = self.it.export(x)
            self.must(self.it.is_array(view), "Backend.export: the view of a shard that is handed to users", type(view))
            self.same(self.get(view, device), answer, "Backend.export: the view of a shard that is handed to users")

    def test_dlpack(self) -> None:
        """An array exported by DLPack reports its device correctly and can be imported again with its values."""
        device = self.devices[0]
        x, answer = self.worked(device, self.numbers(10))
        with self.it.on(device):
            exported = self.it.to_dlpack(x)
            if not hasattr(exported, "__dlpack__"):
                pytest.skip(f"backend {self.backend!r} does not export by DLPack")
            kind, number = exported.__dlpack_device__()
            memory = self.it.dlpack_device(device)
            self.must((int(kind), number) == memory, "Backend.dlpack_device: the device's memory", memory)
            back = self.it.from_dlpack(exported, device)
        self.must(self.it.is_array(back), "Backend.from_dlpack: an array of the backend", type(back))
        self.same(self.get(back, device), answer, "Backend.from_dlpack shares the memory of the exported array")
