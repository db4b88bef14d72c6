"""The PyTorch backend: its namespace, compared with NumPy, and writes to memory that is shared with PyTorch."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'shardtensor[torch]'")
pytest.importorskip("array_api_compat", reason="array-api-compat is not installed: pip install 'shardtensor[torch]'")

import shardtensor as st  # noqa: E402 - what follows wants torch
from shardtensor.backend import function_of  # noqa: E402
from shardtensor.backend.registry import load  # noqa: E402
from tests.draws import drawn  # noqa: E402
from tests.layouts import DTYPES, broadcastable, mesh_of, put, shapes  # noqa: E402
from tests.operands import BINARY, UNARY, defined_operands, values  # noqa: E402
from tests.scripts import new_process, output_of, run_script  # noqa: E402


@pytest.fixture(scope="module")
def xp() -> Any:
    return load("torch").xp


def arrays(data: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return values(dtype, int(np.prod(shape)), data.draw(some.integers(0, 999))).reshape(shape)


def compare(made: Any, wanted: Any, ulps: int = 0, signed: bool = True) -> None:
    wanted = np.asarray(wanted)
    assert isinstance(made, torch.Tensor)
    assert not made.is_conj()
    assert not made.is_neg()
    got = made.numpy()
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    if ulps and wanted.dtype.kind in "fc":
        limit = ulps * float(np.finfo(wanted.dtype).eps)
        near = limit if wanted.dtype.kind == "c" else 0.0
        if ulps > 100 and wanted.size:  # sums may cancel
            near = limit * np.max(np.abs(wanted), initial=1, where=np.isfinite(wanted))
        finite = np.isfinite(wanted)
        np.testing.assert_allclose(got[finite], wanted[finite], rtol=limit, atol=near)
        np.testing.assert_allclose(got[~finite].real, wanted[~finite].real, rtol=limit)
        np.testing.assert_allclose(got[~finite].imag, wanted[~finite].imag, rtol=limit)
    else:
        np.testing.assert_array_equal(got, wanted)
    if wanted.dtype.kind == "f" and signed:
        zero = wanted == 0
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(wanted[zero]))


def call(name: str, *args: Any, **params: Any) -> Any:
    """Calls a function of the namespace, or the composition of an operator that PyTorch lacks."""
    return function_of(load("torch"), name)(*args, **params)


def check_namespace(xp: Any, name: str, *operands: Any) -> None:
    if name in ("reciprocal", "divide"):  # of complex zeros PyTorch makes now NaN and now infinities
        operands = tuple(
            [
                np.where(x == 0, x.dtype.type(1), x) if isinstance(x, np.ndarray) and x.dtype.kind == "c" else x
                for x in operands
            ]
        )
    given = [x if not isinstance(x, np.ndarray) else xp.asarray(x) for x in operands]
    with np.errstate(all="ignore"):
        try:
            wanted = getattr(np, name)(*operands)
        except TypeError:
            with pytest.raises(TypeError):
                call(name, *given)
            return
        signed = name not in ("maximum", "minimum", "fmax", "fmin")  # Either zero is the greater one.
        compare(call(name, *given), wanted, 80 if name in ("pow", "float_power") else 8, signed)


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions_of_every_dtype(name: str, xp: Any) -> None:
    for dtype in DTYPES:
        check_namespace(xp, name, values(dtype, 60))


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_of_every_pair_of_dtypes(name: str, xp: Any) -> None:
    for left, right in itertools.product(DTYPES, repeat=2):
        check_namespace(xp, name, *defined_operands(name, values(left, 60, 1), values(right, 60, 2)))


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions_of_every_shape(name: str, xp: Any) -> None:
    @hypothesis.settings(max_examples=drawn(15))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        check_namespace(xp, name, arrays(data, data.draw(shapes()), data.draw(some.sampled_from(DTYPES))))

    run()


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_of_every_shape(name: str, xp: Any) -> None:
    @hypothesis.settings(max_examples=drawn(25))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        dtypes = [data.draw(some.sampled_from(DTYPES)) for _ in range(2)]
        operands = zip(data.draw(broadcastable(2)), dtypes, strict=True)
        check_namespace(xp, name, *defined_operands(name, *[arrays(data, s, d) for s, d in operands]))

    run()


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("scalar", [True, 3, 2.5, 1 + 2j], ids=repr)
def test_python_scalars_are_weak(name: str, scalar: Any, xp: Any) -> None:
    for dtype in DTYPES:
        x = defined_operands(name, values(dtype, 14), values(dtype, 14))[1]
        if name in ("pow", "float_power") and "c" in (x.dtype.kind, np.asarray(scalar).dtype.kind):
            x = np.where(np.isfinite(x) & (x != 0), x, x.dtype.type(1))
        check_namespace(xp, name, x, scalar)
        check_namespace(xp, name, scalar, x)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_cube_roots_are_accurate_at_every_magnitude(dtype: str, xp: Any) -> None:
    """PyTorch has no `cbrt`, which is composed of powers. Subnormal numbers and all of float16 are tested."""
    info, rng = np.finfo(dtype), np.random.default_rng(0)
    bits = f"i{info.dtype.itemsize}"
    x = rng.integers(0, int(info.max.view(bits)) + 1, 1 << 17, dtype=bits).view(dtype)
    x = np.concatenate([x, -x, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, info.smallest_subnormal], dtype)])
    made, wanted = call("cbrt", xp.asarray(x)).numpy(), np.cbrt(x)
    assert made.dtype == dtype
    exact = ~np.isfinite(x) | (x == 0)
    np.testing.assert_array_equal(made[exact], wanted[exact])
    np.testing.assert_array_equal(np.signbit(made[x == 0]), np.signbit(wanted[x == 0]))
    assert np.max(np.abs(made[~exact] - wanted[~exact]) / np.spacing(np.abs(wanted[~exact]))) <= 4


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_spacing_and_ldexp_are_exact(dtype: str, xp: Any) -> None:
    """PyTorch's `ldexp` is not exact where the power of two overflows or underflows, and there is no `spacing`."""
    info, rng = np.finfo(dtype), np.random.default_rng(0)
    bits = rng.integers(0, 256, (1 << 12) * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    x = np.concatenate([bits, np.array([0.0, -0.0, np.inf, -np.inf, info.max, -info.max, -info.tiny], dtype)])
    exponents = rng.integers(-2200, 2200, (5, x.size))
    with np.errstate(all="ignore"):
        compare(call("spacing", xp.asarray(x)), np.spacing(x))
        for n in (*exponents, *(exponents % 90 - 60), [-(2**40)], [2**31 - 1]):
            compare(call("ldexp", xp.asarray(x), xp.asarray(n)), np.ldexp(x, n))


def test_python_scalars_without_arrays(xp: Any) -> None:
    for name, x, y in [("greater", 10**12, 10**12), ("add", 1, 2.5), ("divide", 1, 2), ("logical_and", True, 0.5)]:
        check_namespace(xp, name, x, y)
    check_namespace(xp, "sqrt", 2)


@pytest.mark.parametrize("scalar", [-1, 256, 300, -129, 2**40, -(2**70)])
def test_integers_out_of_range(scalar: int, xp: Any) -> None:
    for dtype, name in itertools.product(["uint8", "int8", "int64"], ["less", "equal", "greater_equal", "not_equal"]):
        x = values(dtype)
        check_namespace(xp, name, x, scalar)
        check_namespace(xp, name, scalar, x)
    if not 0 <= scalar < 256:
        with pytest.raises(OverflowError):
            xp.add(xp.asarray(values("uint8")), scalar)


@pytest.mark.parametrize("name", UNARY + BINARY)
def test_out(name: str, xp: Any) -> None:
    """Into a new tensor, into a strided view, into an operand; of the result's dtype and of a narrower one."""
    for dtype in ("bool", "int8", "int32", "float16", "float32", "float64", "complex64"):
        x, y = values(dtype, 24, 1).reshape(4, 6), values(dtype, 24, 2).reshape(4, 6)
        x, y = [
            np.where(np.isfinite(a) & ((a != 0) | (a.dtype.kind != "c")), a, a.dtype.type(1))
            for a in defined_operands(name, x, y)
        ]
        operands = [x, y] if name in BINARY else [x]
        with np.errstate(all="ignore"):
            try:
                wanted = getattr(np, name)(*operands)
            except TypeError:
                continue
            narrow = {"float64": "float32", "int64": "int16", "complex128": "complex64"}.get(str(wanted.dtype))
            for kind in (wanted.dtype, narrow or wanted.dtype):
                out = xp.zeros((4, 12), dtype=kind)[:, ::2]
                assert call(name, *map(xp.asarray, operands), out=out) is out
                compare(out, wanted.astype(kind), 80, False)
            wide = xp.zeros((2, 4, 6), dtype=wanted.dtype)
            call(name, *map(xp.asarray, operands), out=wide)
            compare(wide, np.stack([wanted] * 2), 80, False)
            if wanted.dtype == x.dtype:
                first, *others = map(xp.asarray, operands)
                place = first.data_ptr()
                call(name, first, *others, out=first)
                compare(first, wanted, 80, False)
                assert first.data_ptr() == place


def _axes(data: Any, ndim: int) -> Any:
    picked = data.draw(some.lists(some.integers(0, ndim - 1), unique=True)) if ndim else []
    return data.draw(some.sampled_from([None, tuple(picked), *picked]))


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "var", "std", "max", "min", "any", "all", "argmax", "argmin"])
def test_reductions(name: str, xp: Any) -> None:
    @hypothesis.settings(max_examples=drawn(150))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        x = arrays(data, data.draw(shapes()), data.draw(some.sampled_from(DTYPES)))
        axis, keepdims = _axes(data, x.ndim), data.draw(some.booleans())
        if name in ("sum", "prod", "mean", "var", "std"):
            x = np.where(np.abs(x) < 8, x, x.dtype.type(1))
        if name in ("max", "min"):  # one NaN is as good as another
            x = np.where(np.isnan(x), x.dtype.type(np.nan), x) if x.dtype.kind == "c" else x
        if name.startswith("arg") and isinstance(axis, tuple):
            axis = axis[0] if axis else None
        params = {"axis": axis, "keepdims": keepdims}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                wanted = getattr(np, name)(x, **params)
            except ValueError:
                with pytest.raises(ValueError, match="no elements"):
                    getattr(xp, name)(xp.asarray(x), **params)
                return
            if np.asarray(wanted).dtype == "uint64":
                with pytest.raises(TypeError, match="uint64"):
                    getattr(xp, name)(xp.asarray(x), **params)
                wanted, params = getattr(np, name)(x, dtype="int16", **params), params | {"dtype": "int16"}
            compare(getattr(xp, name)(xp.asarray(x), **params), wanted, 120, False)

    run()


def test_totals_in_a_dtype(xp: Any) -> None:
    x = values("int8", 30).reshape(5, 6)
    for name, dtype in itertools.product(["sum", "prod"], ["bool", "int8", "int16", "float32", "complex64"]):
        compare(
            getattr(xp, name)(xp.asarray(x), axis=1, dtype=dtype), getattr(np, name)(x, axis=1, dtype=dtype), 120, False
        )


@pytest.mark.parametrize("left", DTYPES)
@pytest.mark.parametrize("name", ["matmul", "tensordot", "vecdot"])
def test_products(name: str, left: str, xp: Any) -> None:
    for right in DTYPES:
        x, y = [np.where(np.abs(v) < 9, v, v.dtype.type(1)) for v in (values(left, 120, 3), values(right, 120, 4))]
        forms = {
            "matmul": [
                ((5, 4, 6), (6, 4)),
                ((6,), (5, 6, 4)),
                ((4, 30), (30,)),
                ((12,), (12,)),
                ((3, 0), (0, 4)),
                ((0, 3), (3, 2)),
            ],
            "tensordot": [((4, 5, 6), (5, 6, 4)), ((3, 0), (0, 4, 2))],
            "vecdot": [((4, 5, 6), (5, 6)), ((12,), (3, 12)), ((2, 0), (0,))],
        }
        for a, b in forms[name]:
            u, v = x[: np.prod(a)].reshape(a), y[: np.prod(b)].reshape(b)
            params = {"axes": 1 if 0 in a else 2} if name == "tensordot" else {}
            with np.errstate(all="ignore"):
                wanted = getattr(np, name)(u, v, **params)
            compare(getattr(xp, name)(xp.asarray(u), xp.asarray(v), **params), wanted, 200, False)
    u, v = np.arange(24.0).reshape(2, 3, 4), np.arange(60.0).reshape(4, 5, 3)
    axes = ((-1, 1), (0, 2))
    compare(xp.tensordot(xp.asarray(u), xp.asarray(v), axes=axes), np.tensordot(u, v, axes), 120, False)


def test_products_of_integers_where_there_is_no_matrix_product(xp: Any) -> None:
    from shardtensor_torch.namespace import integer_product

    for a, b in [
        ((5, 4, 6), (6, 4)),
        ((6,), (5, 6, 4)),
        ((4, 30), (30,)),
        ((12,), (12,)),
        ((3, 0), (0, 4)),
        ((2, 1, 3, 5), (4, 5, 2)),
    ]:
        for dtype in ("int8", "uint8", "int64"):
            x, y = values(dtype, int(np.prod(a))).reshape(a), values(dtype, int(np.prod(b))).reshape(b)
            compare(integer_product(xp.asarray(x), xp.asarray(y), 50), np.matmul(x, y))


def test_clip_and_where(xp: Any) -> None:
    for left, right in itertools.product(DTYPES, repeat=2):
        x, low, high = values(left, 14, 1), values(right, 14, 2), values(right, 14, 3)
        with np.errstate(all="ignore"):
            for bounds in [(low, None), (None, high), (low, high)]:
                given = [None if b is None else xp.asarray(b) for b in bounds]
                compare(xp.clip(xp.asarray(x), *given), np.clip(x, *bounds), 0, False)
            if left != "bool":
                compare(xp.clip(xp.asarray(x), 1, 3), np.clip(x, 1, 3), 0, False)
        for other in (low, 2, 2.5, True, 1j):
            given = xp.asarray(other) if other is low else other
            compare(xp.where(xp.asarray(high), xp.asarray(x), given), np.where(high, x, other))
            compare(xp.where(xp.asarray(high), given, xp.asarray(x)), np.where(high, other, x))
    x = values("int8")
    compare(xp.clip(xp.asarray(x), -1000, 5), np.clip(x, -1000, 5))


def test_functions_that_are_not_ufuncs(xp: Any) -> None:
    for dtype in DTYPES:
        x = values(dtype, 12).reshape(3, 4)
        t = xp.asarray(x)
        with np.errstate(all="ignore"):
            for name in ("real", "imag", "round", "matrix_transpose", "conj", "zeros_like", "ones_like", "flip"):
                compare(getattr(xp, name)(t), getattr(np, name)(x))
            compare(xp.full_like(t, 1), np.full_like(x, 1))
        for other in DTYPES:
            y = values(other, 4).reshape(1, 4)
            compare(xp.concat([t, xp.asarray(y)]), np.concat([x, y]))
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                small = np.where(np.abs(x) < 100, x, x.dtype.type(0))
                if not (np.dtype(other) == "uint8" and x.dtype.kind in "ifc"):
                    compare(xp.asarray(xp.asarray(small), dtype=other), small.astype(other))
        compare(xp.concat([t, t], axis=None), np.concat([x, x], axis=None))
        compare(xp.stack([t, t], axis=-1), np.stack([x, x], axis=-1))
        compare(xp.eye(3, 5, k=-1, dtype=dtype), np.eye(3, 5, k=-1, dtype=dtype))
        compare(xp.roll(t, 3, axis=1), np.roll(x, 3, axis=1))
    assert xp.asarray(t[:, :2].conj()).is_conj() is False
    for arguments in [(5,), (2, 9, 3), (9, 2, -3), (3, 3), (0.1, 2.0, 0.3)]:
        compare(xp.arange(*arguments), np.arange(*arguments), 2)
    compare(xp.full((2,), np.float32(2.5)), np.full((2,), np.float32(2.5)))
    compare(xp.permute_dims(xp.asarray(3.0), ()), np.asarray(3.0))
    compare(xp.cumulative_sum(xp.asarray([1, 2, 3]), dtype=np.float32), np.asarray([1, 3, 6], np.float32))


def test_host_arrays_of_any_layout(xp: Any) -> None:
    x = np.arange(12.0).reshape(3, 4)
    fixed = x.copy()
    fixed.flags.writeable = False
    for given in (x[::-1, ::-2], x.T, fixed, x.astype(">f8"), x[:, 1:2], 3, [1.5, 2], np.float32(2), x[:0], True):
        compare(xp.asarray(given), np.asarray(given).astype(np.asarray(given).dtype.newbyteorder("=")))
    t = xp.asarray(x)
    x[0, 0] = 99
    assert t[0, 0] == 0
    assert xp.asarray(t) is t
    assert xp.asarray(t, copy=True).data_ptr() != t.data_ptr()
    z = xp.asarray([1.5 + 2j])
    with pytest.warns(np.exceptions.ComplexWarning):
        part = xp.asarray(z, dtype="float64")
    part += 1
    assert z[0] == 1.5 + 2j
    with pytest.raises(TypeError, match="uint16"):
        xp.asarray(np.zeros(2, np.uint16))


def test_full_with_values_out_of_range(xp: Any) -> None:
    """A Python integer is refused, and a scalar of NumPy's wraps around, as in NumPy."""
    for value, dtype in ((300, "int8"), (-1, "uint8"), (2**63, "int64")):
        with pytest.raises(OverflowError):
            xp.full((2,), value, dtype=dtype)
    compare(xp.full((2,), np.int64(300), dtype="int8"), np.full((2,), np.int64(300), "int8"))
    compare(xp.full((2,), 2.5, dtype="int8"), np.full((2,), 2.5, "int8"))


def test_functions_of_dtypes(xp: Any) -> None:
    for name in DTYPES:
        dtype = np.dtype(name)
        t = xp.zeros(2, dtype=dtype)
        assert load("torch").dtype_of(t) == dtype
        assert load("torch").has_dtype(dtype)
        for kind in ("bool", "integral", "real floating", "complex floating", "numeric", "signed integer"):
            assert xp.isdtype(t.dtype, kind) == xp.isdtype(dtype, kind) == np.isdtype(dtype, kind)
        for other in DTYPES:
            wanted = np.result_type(dtype, np.dtype(other))
            assert load("torch").dtype_of(xp.zeros(1, dtype=xp.result_type(t, xp.zeros(1, dtype=other)))) == wanted
    for name in ("uint16", "uint64", "M8[s]", "m8[s]", "longdouble"):
        assert not load("torch").has_dtype(np.dtype(name))
    assert xp.finfo(torch.float16).eps == np.finfo(np.float16).eps
    assert xp.iinfo(torch.int8).max == 127
    with pytest.raises(TypeError, match="uint16"):
        load("torch").dtype_of(torch.zeros(1, dtype=torch.uint16))


# -- the backend -----------------------------------------------------------------------------------


def row(count: int = 4) -> st.Mesh:
    return mesh_of((count,), "torch")


def places(x: st.ShardedTensor) -> list[int]:
    return [s.data.data_ptr() for s in x.addressable_shards]


def test_torch_is_imported_only_by_the_backend() -> None:
    code = "import sys, shardtensor_torch, shardtensor as st; st.zeros(3); assert 'torch' not in sys.modules"
    output_of(new_process("-c", code))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("torch", r"torch is not installed; pip install 'shardtensor\[torch\]'"),
        ("array_api_compat", "array-api-compat is not"),
    ],
)
def test_the_error_names_the_missing_package(missing: str, message: str) -> None:
    code = f"""
import sys, unittest.mock
sys.modules |= {{"torch": unittest.mock.MagicMock(), {missing!r}: None}}  # Importing torch takes a second.
import shardtensor as st
st.devices("torch")
"""
    output = run_script(code).stderr
    assert "BackendError" in output
    assert message.replace("\\", "") in output


def test_the_error_of_a_broken_library(tmp_path: Any) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: no such file')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport shardtensor as st; st.devices('torch')"
    output = run_script(code).stderr
    assert "BackendError: torch does not start: OSError('libtorch_cpu.so: no such file')" in output


def test_devices() -> None:
    assert [d.id for d in st.devices("torch")] == list(range(8))
    assert load("torch").priority < 0


@pytest.mark.parametrize(
    "write", [lambda x, y: x.__iadd__(y), lambda x, y: x.__setitem__(slice(1, -1), 3), lambda x, y: x[::2].__imul__(2)]
)
def test_exclusive_tensors_are_written_in_place(write: Any) -> None:
    for x in (
        st.ones((8, 3), device=row()),
        put(np.ones((8, 3)), "torch"),
        st.pmap(lambda p: p + 1, st.shard(put(np.ones(8), "torch"), devices=row()))[0],
    ):
        y = st.ones_like(x)
        before = places(x)
        for _ in range(2):
            with st.transfers() as log:
                write(x, y)
            assert log.copied == 0
            np.asarray(x)  # views of its memory, dropped
        assert places(x) == before


HOLDERS: dict[str, Any] = {
    "a view": lambda t: t[1:],
    "an alias": lambda t: t.detach(),
    "a storage": lambda t: t.untyped_storage(),
    "a host array": lambda t: t.numpy(),
    "DLPack": lambda t: np.from_dlpack(t),
    "a list": lambda t: [t],
    "a saved operand": lambda t: torch.ones_like(t, requires_grad=True) * t,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_writes_are_not_visible_to_other_holders(holder: str) -> None:
    x = put(np.arange(8.0), "torch")
    wanted = np.asarray(x).copy()
    held = [HOLDERS[holder](s.data) for s in x.addressable_shards]
    before = places(x)
    x += 1
    assert not set(places(x)) & set(before)
    np.testing.assert_array_equal(np.asarray(x), wanted + 1)
    del held


@pytest.mark.parametrize("holder", HOLDERS)
def test_results_with_other_holders_are_copied(holder: str) -> None:
    held: list[Any] = []

    def keep(p: Any) -> Any:
        made = p + 1
        held.append((HOLDERS[holder](made), made.data_ptr()))
        return made

    (x,) = st.pmap(keep, [put(np.arange(4.0), "torch", (1,))])
    assert places(x) != [held[0][1]]
    x += 1
    np.testing.assert_array_equal(np.asarray(x), np.arange(4.0) + 2)


def test_results_of_mapped_functions_are_adopted() -> None:
    seen: list[int] = []

    def fresh(p: Any) -> Any:
        made = p + 1
        seen.append(made.data_ptr())
        return made

    given = put(np.arange(4.0), "torch", (1,))
    with st.transfers() as log:
        (x,) = st.pmap(fresh, [given])
        (same,) = st.pmap(lambda p: p, [x])
    assert log.copied == 0
    assert places(x) == places(same) == seen
    same += 1  # and no write to one shows in the other
    np.testing.assert_array_equal(np.asarray(x), np.arange(4.0) + 1)


@pytest.mark.parametrize(
    "result",
    [
        lambda p: torch.from_numpy(GIVEN),
        lambda p: p[:1].expand(4, 3),
        lambda p: p.as_strided((2, 2), (1, 1)),
        lambda p: (p + 1j).conj(),
        lambda p: (p + 1j).conj().imag,
        lambda p: torch.nn.Parameter(p + 1),
        lambda p: (p * torch.ones(3, dtype=p.dtype, requires_grad=True)).sum(),
        lambda p: p.mT,
        lambda p: p[:, ::2],
    ],
)
def test_results_of_all_kinds(result: Any) -> None:
    value = np.arange(12.0).reshape(4, 3)
    (x,) = st.pmap(result, [put(value, "torch", (1,))])
    with torch.no_grad():
        wanted = result(torch.from_numpy(value.copy())).resolve_conj().resolve_neg().numpy().copy()
    np.testing.assert_array_equal(np.asarray(x), wanted)
    assert not any(s.data.requires_grad for s in x.addressable_shards)
    x += 1
    np.testing.assert_array_equal(np.asarray(x), wanted + 1)
    np.testing.assert_array_equal(GIVEN, np.arange(3.0))


GIVEN = np.arange(3.0)


def test_donated_memory_is_writable() -> None:
    x = put(np.arange(4.0), "torch", (1,))
    (before,) = places(x)
    with st.transfers() as log:
        (y,) = st.pmap(lambda p: p.add_(1), [x], donate=True)
    assert log.copied == 0
    assert places(y) == [before]
    np.testing.assert_array_equal(np.asarray(y), np.arange(4.0) + 1)


def test_gradients_inside_of_a_map() -> None:
    value = np.arange(12.0).reshape(6, 2)
    weights = torch.tensor([2.0, -1.0], dtype=torch.float64)

    def functional(rows: Any) -> Any:
        return torch.func.grad(lambda w: (rows @ w).square().sum())(weights)

    def taped(rows: Any) -> Any:
        w = weights.clone().requires_grad_()
        st.sum(st.square(st.matmul(rows, w))).backward()
        return w.grad

    wanted = 2 * value.T @ (value @ weights.numpy())
    for fn in (functional, taped):
        parts = st.pmap(fn, st.shard(put(value, "torch", (3,)), devices=row(3)))
        np.testing.assert_allclose(np.asarray(st.sum(st.stack(parts), axis=0)), wanted)


def test_tensors_of_the_users_as_operands() -> None:
    x = put(np.arange(8.0), "torch")
    for given in (torch.ones(8), torch.ones(8, requires_grad=True), torch.ones(8).double()[:], torch.arange(8)[::1]):
        wanted = np.arange(8.0) + given.detach().numpy()
        np.testing.assert_array_equal(np.asarray(st.add(x, given)), wanted)
        np.testing.assert_array_equal(np.asarray(x + given), wanted)
    given = torch.zeros(8)
    made = st.asarray(given)
    given += 1
    np.testing.assert_array_equal(np.asarray(made), np.zeros(8))
    x[2:4] = torch.tensor([5.0, 6.0])
    assert np.asarray(x)[2:4].tolist() == [5, 6]
    with pytest.raises(TypeError, match="uint16"):
        st.add(x, torch.zeros(8, dtype=torch.uint16))
    with pytest.raises(TypeError):
        st.add(x, torch.ones(8, device="meta"))


@pytest.mark.parametrize("shape", [(1,), (7,), (5, 4), (0, 3)])
@pytest.mark.parametrize("count", [1, 3])
def test_negative_steps_are_read_and_written(shape: tuple[int, ...], count: int) -> None:
    value = np.arange(float(np.prod(shape))).reshape(shape)
    for look in (
        np.s_[::-1],
        np.s_[::-2],
        np.s_[-2::-3],
        np.s_[..., ::-1],
        np.s_[None, ::-1],
        np.s_[1:0:-1],
        np.s_[0::-1],
    ):
        x, a = put(value, "torch", (count,)), value.copy()
        np.testing.assert_array_equal(np.asarray(x[look]), a[look])
        x[look] += 10
        a[look] += 10
        np.testing.assert_array_equal(np.asarray(x), a)
        x[look] = 3
        a[look] = 3
        np.testing.assert_array_equal(np.asarray(x), a)


def test_views_of_basic_indices() -> None:
    value = np.arange(60.0).reshape(3, 4, 5)
    t = torch.from_numpy(value)
    for index in (
        np.s_[1],
        np.s_[::-1],
        np.s_[1, ::-2, None, 3:0:-1],
        np.s_[..., -1],
        np.s_[None, ..., ::-1],
        np.s_[2:0:-1, ..., 1],
        (),
        np.s_[5:2:-1],
    ):
        compare(load("torch").view(t, index), value[index])
    assert load("torch").view(t, np.s_[1:, ::2]).data_ptr() != 0
    assert load("torch").view(t, np.s_[1:, None]).data_ptr() == t[1:].data_ptr()
    assert load("torch").view(t, np.s_[0::-1]).data_ptr() == t.data_ptr()  # one element is a view


@pytest.mark.parametrize(
    "index", [np.s_[1:3], np.s_[...], np.array([0, 2]), np.array([True, False, True, True])], ids=repr
)
def test_values_are_cast_where_they_are_assigned(index: Any) -> None:
    for value in (np.float32(2.5), np.bool_(True), 3, np.float64(0.1), put(np.full(1, 0.1), "torch")):
        x, a = put(np.zeros(4, "float32"), "torch"), np.zeros(4, "float32")
        x[index] = value
        a[index] = np.asarray(value)
        np.testing.assert_array_equal(np.asarray(x), a)


def test_a_host_array_is_a_read_only_view_that_keeps_its_values() -> None:
    x = put(np.arange(4.0), "torch", (1,))
    host = np.asarray(x)
    assert not host.flags.writeable
    assert host.__array_interface__["data"][0] == places(x)[0]
    x += 1
    np.testing.assert_array_equal(host, np.arange(4.0))


def test_clip_of_bools() -> None:
    """Bounds of bools keep the dtype, and others promote it, as in NumPy."""
    a = np.array([True, False, True])
    for low, high in ((False, True), (0, 1), (0.5, None), (None, False), (a, True)):
        found, wanted = st.clip(put(a, "torch"), low, high), np.clip(a, low, high)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found), wanted)


def test_integers_are_rounded_to_tens() -> None:
    a = np.array([15, 25, -15, 14])
    for decimals in (-1, 0, 2):
        np.testing.assert_array_equal(np.asarray(st.round(put(a, "torch"), decimals)), np.round(a, decimals))


def test_errors_name_unsupported_dtypes() -> None:
    with pytest.raises(TypeError, match="uint16"):
        st.device_put(np.zeros(3, "uint16"), st.devices("torch")[0])
    wide = st.asarray(np.full(3, 60000, "uint16"), dtype=st.int32, device=st.devices("torch")[0])
    assert wide.tolist() == [60000] * 3
    x = put(np.full(4, 200, "uint8"), "torch")
    totals = [st.sum, st.prod, st.nansum, st.nanprod]
    for total in (*totals, st.cumulative_sum, st.cumulative_prod, st.nancumsum, st.nancumprod):
        with pytest.raises(st.ArgumentTypeError, match=r"uint64.*pass another dtype="):
            total(x)
        assert np.max(np.asarray(total(x, dtype="int64"))) in (800, 200**4)
    for total in totals:
        with pytest.raises(st.ArgumentTypeError, match=r"uint64.*pass another dtype="):
            total(x, where=x > 0, initial=1)
        assert total(x, where=x > 0, initial=1, dtype="int64").item() in (801, 200**4)
    with pytest.raises(ValueError, match="negative integer powers"):
        st.pow(put(np.arange(4), "torch"), -1)


def test_memory_errors_name_the_device() -> None:
    with pytest.raises(MemoryError, match="torch:0"):
        st.zeros((1 << 58,), device=st.devices("torch")[0])
    assert st.ones(3, device=st.devices("torch")[0]).tolist() == [1, 1, 1]


def test_memory_is_shared_in_both_directions() -> None:
    backend = load("torch")
    device = backend.devices()[0]
    x = np.arange(4.0)
    t = backend.from_dlpack(x, device)
    assert t.data_ptr() == x.__array_interface__["data"][0]
    assert backend.memory_of(t) is None
    assert not backend.is_exclusive([t], 9)
    exported = backend.to_dlpack(torch.arange(3) * (1 + 1j))
    np.testing.assert_array_equal(np.from_dlpack(exported), np.arange(3) * (1 + 1j))
    assert backend.dlpack_device(device) == (1, 0)


def test_programs_take_turns_with_their_own_modes() -> None:
    """One program records gradients and the other does not. Both keep their mode across a collective, and so does the
    caller.
    """

    def work(x: Any) -> Any:
        recording = st.axis_index("i") == 0
        with torch.set_grad_enabled(recording):
            w = torch.ones(3, requires_grad=True)
            for _ in range(3):
                assert torch.is_grad_enabled() == recording
                x = st.psum(x, "i")
            assert (w * x).requires_grad == recording
        assert torch.is_grad_enabled()
        return x

    parts = [st.device_put(np.ones(3), d) for d in st.devices("torch")[:4]]
    with torch.no_grad():
        made = st.pmap(lambda x: st.psum(torch.is_grad_enabled(), "i"), parts, axis_name="i")
        assert not torch.is_grad_enabled()
    assert st.pmap(work, parts, axis_name="i")[3].tolist() == [64.0] * 3
    assert torch.is_grad_enabled()


def test_collectives_raise_where_programs_cannot_be_suspended() -> None:
    def work(x: Any) -> Any:
        with torch.inference_mode():
            return st.psum(x, "i")

    parts = [st.device_put(np.ones(3), d) for d in st.devices("torch")[:2]]
    with pytest.raises(st.BackendError, match=r"a collective inside torch\.inference_mode"):
        st.pmap(work, parts, axis_name="i")
    assert st.pmap(lambda x: st.psum(x, "i"), parts, axis_name="i")[0].tolist() == [2.0] * 3


def test_programs_call_modules_of_their_own() -> None:
    """`torch.func.functional_call` writes to the module while it runs: see docs/programs.md."""
    count = 4
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    modules = [copy.deepcopy(module) for _ in range(count)]
    params = {key: value.detach().numpy().copy() for key, value in module.named_parameters()}
    x = np.random.default_rng(0).normal(size=(count, 16, 3)).astype("float32")

    def loss(params: Any, module: Any, x: Any) -> Any:
        return torch.func.functional_call(module, params, (x,)).square().mean()

    def step(params: Any, x: Any) -> Any:
        return st.pmean(torch.func.grad(loss)(params, modules[st.axis_index("i")], x), "i")

    found = [torch.func.grad(loss)(dict(module.named_parameters()), module, torch.from_numpy(part)) for part in x]
    mapped = st.pmap(step, axis_name="i", in_axes=(None, 0), out_axes=None, devices=st.devices("torch")[:count])
    for _ in range(5):
        for key, value in mapped(params, x).items():
            wanted = np.mean([one[key].detach().numpy() for one in found], axis=0)
            np.testing.assert_allclose(np.asarray(value), wanted, atol=1e-5)


@pytest.mark.full
def test_errors_of_torch_in_mapped_functions_at_any_depth() -> None:
    """Torch takes a trace of the C stack for each, as `test_c_stacks_of_programs_end_in_those_of_their_callers` does."""
    code = """if True:
        import functools, random
        import numpy as np, shardtensor as st, torch

        class Operand:
            def __init__(self, then):
                self.then = then

            def __add__(self, other):
                return self.then()

        ways = [
            lambda then: list(map(lambda _: then(), [0])),
            lambda then: functools.reduce(lambda x, y: then(), [0, 0]),
            lambda then: Operand(then) + 1,
            lambda then: eval("then()", {"then": then}),
            lambda then: np.vectorize(lambda _: bool(then()), otypes=[bool])([0]),
        ]

        def deep(then, depth):
            return random.choice(ways)(lambda: deep(then, depth - 1)) if depth else then()

        def fn(x):
            try:
                torch.ones(2, 3) @ torch.ones(2, 3)
            except RuntimeError:
                x = st.psum(x, "i")
            return torch.ones(2)[[int(x)]]

        def failing():
            try:
                st.pmap(fn, [1, 2, 3], axis_name="i", devices=st.devices("torch")[:3])
            except IndexError as error:
                found.append(str(error))

        found = []
        random.seed(1)
        for _ in range(100):
            deep(failing, random.randrange(20))
        assert len(found) == 100 and all("out of bounds" in error for error in found), found
    """
    variables = {"SHARDTENSOR_NUM_DEVICES": "3", "SHARDTENSOR_NUM_THREADS": "1"}
    output_of(new_process("-X", "faulthandler", "-c", code, seconds=60, **variables))
