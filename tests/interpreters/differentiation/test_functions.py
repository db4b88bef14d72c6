"""The gradients of all public functions: each has a case here, or an operator of which `test_operators` has one, or is
discrete, or refuses. A new public function without an entry fails `test_every_public_function_has_an_entry`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import OPS
from tests.draws import drawn
from tests.interpreters.differentiation.numeric import check_gradients, direction, slope, weighted
from tests.interpreters.differentiation.test_operators import DIFFERENTIATED, class_of
from tests.layouts import everywhere, put

CASES: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {}
"""Functions, with the host arrays and numbers that are their differentiated arguments."""

UNTRACED: set[str] = set()
"""The functions whose shapes or results depend on values, which a trace does not know."""

RNG = np.random.default_rng(0)
X = RNG.permutation(np.linspace(-1.53, 1.97, 45)).reshape(9, 5)
"""A matrix of different numbers, of which none are zero."""

Y = RNG.uniform(0.4, 1.6, (9, 5))
V, W = RNG.permutation(np.linspace(-1, 1.7, 12)), RNG.uniform(0.4, 1.6, 4)
S = RNG.uniform(0.4, 1.6, (4, 4))
C = X + 1j * Y
MASK = X > 0.2
PLACES = np.array([0, 2, 2, 5, 0, 0])


def case(name: str, fn: Callable[..., Any], *given: Any, traced: bool = True) -> None:
    CASES.setdefault(name, []).append((fn, given))
    if not traced:
        UNTRACED.add(name)


def written(write: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that returns its first argument after a function has written a copy of it."""

    def fn(x: Any, *more: Any) -> Any:
        y = x * 1.0
        write(y, *more)
        return y * y

    return fn


# -- elementwise functions, choices and parts ------------------------------------------------------

case("angle", st.angle, C)
case("nan_to_num", lambda x, y: st.nan_to_num(st.where(MASK, np.nan, x)) * y, X, Y)
case("nan_to_num", lambda c: st.nan_to_num(c), C)
case("sinc", st.sinc, X)
case("unwrap", lambda x: st.unwrap(4 * x, axis=0), X)
case("fix", lambda x, y: st.fix(x) * y, X, Y)
case("real_if_close", st.real_if_close, X)
case("select", lambda x, y: st.select([MASK, X > 1], [x * x, y], 0.5), X, Y)
case("choose", lambda x, y: st.choose(np.asarray(MASK, int), [x, y]), X, Y)
case("piecewise", lambda x: st.piecewise(x, [MASK, ~MASK], [lambda x: x**2, lambda x: -x]), X, traced=False)
case("modf", lambda x: st.modf(x)[0], X)
case("frexp", lambda x: st.frexp(x)[0], Y)
case("divmod", lambda x, y: st.divmod(x, y)[1], X, Y)
case("isclose", lambda x: st.isclose(x, X + 1) * x, X)

# -- shapes, joins, parts and copies ---------------------------------------------------------------

case("array_split", lambda x: st.array_split(x, 4), X)
case("split", lambda x: [y * y for y in st.split(x, [2, 3])], X)
case("hsplit", lambda x: st.hsplit(x, [2]), X)
case("vsplit", lambda x: st.vsplit(x, 3), X)
case("dsplit", lambda x: st.dsplit(x.reshape(3, 3, 5), 5), X)
case("unstack", lambda x: st.unstack(x * x, axis=1), X)
case("atleast_1d", lambda x: st.atleast_1d(x[0, 0]), X)
case("atleast_2d", lambda x: st.atleast_2d(x), V)
case("atleast_3d", lambda x: st.atleast_3d(x), X)
case("block", lambda x, y: st.block([[x, y], [y, x * x]]), X, Y)
case("broadcast_arrays", lambda x, v: st.broadcast_arrays(x, v[:5]), X, V)
case("fliplr", lambda x: st.fliplr(x) * x, X)
case("flipud", lambda x: st.flipud(x) * x, X)
case("meshgrid", lambda v, w: st.meshgrid(v, w), V, W)
case("ix_", lambda x: x[st.ix_([0, 2, 0], [1, 3])], X)
case("rollaxis", lambda x: st.rollaxis(x, 1), X)
case("swapaxes", lambda x: st.swapaxes(x, 0, 1), X)
case("transpose", lambda x: st.transpose(x) @ x, X)
case("compress", lambda x: st.compress([True, False, True], x, axis=0), X)
case("extract", lambda x: st.extract(MASK, x), X, traced=False)
case("trim_zeros", lambda v: st.trim_zeros(st.where(np.arange(12) < 2, 0, v)), V, traced=False)
for mode in ("edge", "reflect", "symmetric", "wrap", "maximum", "minimum", "mean", "median", "linear_ramp", "constant"):
    case("pad", lambda x, mode=mode: st.pad(x, ((2, 1), (0, 3)), mode), X)
case("to_batched_list", lambda x: st.to_batched_list(x, 4), X)
case("device_put", lambda x: st.device_put(x, st.devices()[0]), X)
case("with_sharding_constraint", lambda x: st.with_sharding_constraint(x, st.NamedSharding(x.sharding.mesh, st.P())), X)

# -- writes ----------------------------------------------------------------------------------------

case("fill_diagonal", written(lambda y, a: st.fill_diagonal(y, a)), X, W)
case("place", written(lambda y, v: st.place(y, MASK, v)), X, V, traced=False)
case("putmask", written(lambda y, x: st.putmask(y, MASK, x)), X, Y)
case("put_along_axis", written(lambda y, v: st.put_along_axis(y, PLACES[None, :5], v[:5], axis=0)), X, V)
case("copyto", written(lambda y, x: np.copyto(y, x, where=MASK)), X, Y)
case("setitem", written(lambda y, v: y.__setitem__((PLACES, PLACES % 5), v[:6])), X, V)
case("setitem", written(lambda y, a: y.__setitem__(MASK, a)), X, 0.3)
case("setitem", written(lambda y, v: y.__setitem__(([3, 1], slice(None)), v[:5])), X, V)
case("getitem", lambda x: x[PLACES] * x[PLACES, 1:2] + x[None, [1], [2]], X)
case("getitem", lambda x: x[MASK] ** 2, X, traced=False)

# -- sums, products and order ----------------------------------------------------------------------

case("average", lambda x, w: st.average(x, axis=0, weights=w[:9]), X, 2 + V)
case("ptp", lambda x: st.ptp(x, axis=0), X)
case("cov", lambda x, y: st.cov(x, y), X[:, :4], Y[:, :4])
case("cov", lambda x: st.cov(x, rowvar=False, aweights=W[[0, 1, 2, 3, 0, 1, 2, 3, 0]]), X)
case("corrcoef", lambda x: st.corrcoef(x, rowvar=False), X)
case("cumsum", lambda x: st.cumsum(x, axis=1), X)
case("cumprod", lambda x: st.cumprod(x), V)
case("nancumsum", lambda x: st.nancumsum(st.where(MASK, x, np.nan), axis=0), X)
case("nancumprod", lambda x: st.nancumprod(st.where(MASK, x, np.nan), axis=0), X)
for name in ("nansum", "nanprod", "nanmean", "nanvar", "nanstd", "nanmax", "nanmin", "nanmedian"):
    case(name, lambda x, name=name: getattr(st, name)(st.where(X < 1, x, np.nan), axis=0), X)
case("logcumsumexp", lambda x: st.logcumsumexp(x, axis=0), X)
case("apply_over_axes", lambda x: st.apply_over_axes(st.sum, x * x, [0, 1]), X)
case("diff", lambda x, y: st.diff(x, axis=0, n=2, prepend=y), X, Y)
case("ediff1d", lambda x, v, w: st.ediff1d(x, to_end=v, to_begin=w), X, V, W)
case("trapezoid", lambda x, v: st.trapezoid(x, v[:9], axis=0), X, V)
case("trapezoid", lambda x, a: st.trapezoid(x, dx=a), X, 0.7)
case("partition", lambda x: st.partition(x, 3, axis=0)[3], X)
case("sort_complex", lambda x: st.real(st.sort_complex(x)), V)
case("topk", lambda x: st.topk(x, 3)[0], X)
METHODS = (
    "linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf", "averaged_inverted_cdf", "closest_observation",
    "interpolated_inverted_cdf", "hazen", "weibull", "median_unbiased", "normal_unbiased",
)  # fmt: skip
Q = np.array([0.33, 0.71, 0.02, 0.99])
for method in METHODS:
    given = (X,) if method == "midpoint" else (X, Q)
    case("quantile", lambda x, q=Q, method=method: st.quantile(x, q, axis=0, method=method), *given)
case("quantile", lambda x: st.quantile(x, 0.3, axis=(0, 1), keepdims=True), X)
case("quantile", lambda x: st.quantile(x, 0.3), RNG.permutation(np.linspace(-1, 1, 9000)))
case("median", lambda x: st.median(x), RNG.permutation(np.linspace(-1, 1, 9000)))
NAN = np.where((X > 1.7) | (np.arange(9)[:, None] == 4), np.nan, 0)
case("nanquantile", lambda x, q: st.nanquantile(x + NAN, q, axis=0), X, Q)
case("nanmedian", lambda x: st.nanmedian(x + NAN, axis=1)[[0, 1, 2, 3, 5]], X)
case("percentile", lambda x: st.percentile(x, [30, 70], axis=1), X)
case("nanpercentile", lambda x: st.nanpercentile(x, 40), X)

# -- products --------------------------------------------------------------------------------------

case("dot", lambda x, y: st.dot(x, y.T), X, Y)
case("inner", lambda x, y: st.inner(x, y), X, Y)
case("outer", lambda v, w: st.outer(v, w), V, W)
case("kron", lambda x, s: st.kron(x, s), X, S)
case("einsum", lambda x, y, s: st.einsum("ij,ik,kl,jm->lm", x, y[:, :4], s, y.T), X, Y, S)
case("einsum", lambda s: st.einsum("ii->i", s) + st.einsum("ij,ji", s, s) + st.einsum("i...->...", s), S)
case("vander", lambda v: st.vander(v, 4), V)
case("polyadd", lambda v, w: st.polyadd(v, w), V, W)
case("polysub", lambda v, w: st.polysub(v, w), V, W)
case("polymul", lambda v, w: st.polymul(v, w), V, W, traced=False)
case("polyder", lambda w: st.polyder(w), W)
case("polyint", lambda w: st.polyint(w), W)
case("polyfit", lambda x: st.polyfit(np.arange(9.0), x[:, 0], 2), X, traced=False)
case("polyval", lambda w, x: st.polyval(w, x), W, X)
for mode in ("full", "same", "valid"):
    case("convolve", lambda v, w, mode=mode: st.convolve(v, w, mode), V, W)
    case("correlate", lambda v, w, mode=mode: st.correlate(w, v, mode), V, W)
case("convolve", lambda v, w: st.convolve(v, w), np.sin(np.arange(80)), np.cos(np.arange(40)))

# -- points, counts and random numbers -------------------------------------------------------------

POINTS = np.array([-1.0, -0.3, 0.4, 1.3])
case("interp", lambda x, p, w: st.interp(x, p, w), X, POINTS, W)
case("interp", lambda x, p, w: st.interp(x, p, w, left=1, right=2), X, POINTS, W)
case("interp", lambda x, p, w: st.interp(x, p, w, period=1.7), X, POINTS, W)
case("interp", lambda x, w: st.real(st.interp(x, POINTS, w * (1 + 2j))), X, W)
case("gradient", lambda x: st.gradient(x, edge_order=2), X)
case("gradient", lambda x: st.gradient(x, 0.5, np.array([0, 0.1, 0.5, 0.6, 1])), X)
case("histogram", lambda y: st.histogram(X, 4, weights=y)[0], Y, traced=False)
case("histogram", lambda y: st.histogram(X, [-1, 0, 0.5, 1], weights=y, density=True)[0], Y)
case("histogram2d", lambda v: st.histogram2d(V, V * V, 3, weights=v)[0], V, traced=False)
case("histogramdd", lambda v: st.histogramdd([V, V * V], 3, weights=v)[0], V, traced=False)
case("bincount", lambda v: st.bincount(np.arange(12) % 5, weights=v), V, traced=False)
case("random.choice", lambda x: st.random.choice(st.random.key(0), x, (4,)), X)
case("i0", lambda x: st.i0(9 * x), X)

# -- functions of functions ------------------------------------------------------------------------

case("stop_gradient", lambda x: x * st.stop_gradient(X), X)
case("remat", lambda x: st.remat(st.sin)(x), X)
case("jit", lambda x: st.jit(st.sin)(x), X)
case("grad", lambda x: st.grad(lambda y: (y**3).sum())(x), X)
case("value_and_grad", lambda x: st.value_and_grad(lambda y: (y**3).sum())(x), X)
case("vjp", lambda x: st.vjp(st.sin, x)[1](x), X)
case("jvp", lambda x: st.jvp(st.sin, (x,), (x,)), X)

# -- methods of ufuncs -----------------------------------------------------------------------------

for ufunc in (np.add, np.multiply, np.maximum, np.minimum, np.fmax, np.fmin, np.hypot, np.logaddexp, np.logaddexp2):
    case("ufunc.reduce", lambda y, ufunc=ufunc: ufunc.reduce(y, axis=0), Y)
    case("ufunc.accumulate", lambda y, ufunc=ufunc: ufunc.accumulate(y, axis=0), Y)
    case("ufunc.reduceat", lambda y, ufunc=ufunc: ufunc.reduceat(y, [0, 4, 2, 7, 7, 8], axis=0), Y)
for ufunc in (np.subtract, np.divide):
    case("ufunc.accumulate", lambda y, ufunc=ufunc: ufunc.accumulate(y, axis=1), Y)
    case("ufunc.reduceat", lambda y, ufunc=ufunc: ufunc.reduceat(y, [1, 4, 2], axis=0), Y)
    case("ufunc.outer", lambda y, w, ufunc=ufunc: ufunc.outer(y, w), Y, W)
case("ufunc.accumulate", lambda y: np.power.accumulate(y, axis=0), Y[:4])
for ufunc in (np.add, np.subtract, np.multiply, np.divide, np.maximum, np.hypot):
    case("ufunc.at", written(lambda y, v, ufunc=ufunc: ufunc.at(y, (PLACES, 1), v[:6])), Y, V + 2)
    case("ufunc.at", written(lambda y, v, ufunc=ufunc: ufunc.at(y, [3, 1], v[:5])), Y, V + 2)
case("ufunc.at", written(lambda y: np.sin.at(y, PLACES)), Y)

# -- others ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "apply_along_axis": (lambda x: st.apply_along_axis(np.sum, 0, x), r"apply_along_axis: .*st\.custom_vjp"),
    "ufunc.reduceat": (lambda x: np.power.reduceat(x, [0, 2]), "reduceat: it has no derivative for pow"),
    "random.gamma": (
        lambda y: st.grad(lambda y: st.random.gamma(st.random.key(0), y).sum())(y), "gamma: it has no derivative"
    ),
    "histogram": (lambda x: st.histogram(x, 3)[1], "its gradient would be lost"),
    "histogram_bin_edges": (lambda x: st.histogram_bin_edges(x, 3), "its gradient would be lost"),
    "poly": (lambda x: st.poly(x[0]), "poly: the elements of a tensor are taken out"),
    "polydiv": (lambda x: st.polydiv(x[0], x[0, :2])[0], "polydiv: the elements of a tensor are taken out"),
    "roots": (lambda x: st.abs(st.roots(x[0])), "roots: the elements of a tensor are taken out"),
    "unique": (st.unique, "unique: "),
    "view": (lambda x: x[:, :4].copy().view("complex64").real, "view: it has no derivative: bits are no numbers"),
}  # fmt: skip
"""Functions without derivatives, and what the errors say."""

DISCRETE: dict[str, Callable[[Any], Any]] = {
    "allclose": lambda x: st.allclose(x, X),
    "argwhere": lambda x: st.argwhere(x > 0),
    "array_equal": lambda x: st.array_equal(x, X),
    "array_equiv": lambda x: st.array_equiv(x, X),
    "common_type": st.common_type,
    "digitize": lambda x: st.digitize(x, POINTS),
    "flatnonzero": st.flatnonzero,
    "histogram": lambda x: st.histogram(x, 3, range=(-1, 1)),
    "intersect1d": lambda x: st.intersect1d(x, X),
    "iscomplex": st.iscomplex,
    "iscomplexobj": st.iscomplexobj,
    "isnat": lambda x: st.isnat(np.zeros(3, "m8[s]")),
    "isneginf": st.isneginf,
    "isposinf": st.isposinf,
    "isreal": st.isreal,
    "isrealobj": st.isrealobj,
    "lexsort": lambda x: st.lexsort((x[0], x[1])),
    "nanargmax": lambda x: st.nanargmax(x, axis=0),
    "nanargmin": st.nanargmin,
    "packbits": lambda x: st.packbits(x > 0, axis=1),
    "random.bernoulli": lambda x: st.random.bernoulli(st.random.key(0), st.abs(x) / 2),
    "random.categorical": lambda x: st.random.categorical(st.random.key(0), x),
    "random.poisson": lambda x: st.random.poisson(st.random.key(0), st.abs(x)),
    "result_type": lambda x: st.result_type(x, 1),
    "setdiff1d": lambda x: st.setdiff1d(x, X),
    "setxor1d": lambda x: st.setxor1d(x, X),
    "union1d": lambda x: st.union1d(x, X),
    "unpackbits": lambda x: st.unpackbits(st.astype(x > 0, "uint8"), axis=1),
}
"""Functions whose results are no real numbers, or depend on which elements are equal: they are called, or refuse."""

ELSEWHERE = """
    associative_scan cond fori_loop map scan switch while_loop
    map_overlap pmap shard shard_jit shard_map smap
    all_gather all_to_all pbroadcast pcast pmax pmean pmin ppermute pprod pshuffle psum psum_scatter pswapaxes pvary ragged_all_to_all
    auto_axes checkpoint_name custom_jvp custom_vjp explicit_axes hessian jacfwd jacrev linearize vmap accumulate mixed_precision
"""
"""Functions of functions, maps and functions of linear algebra, which have tests of their own."""

NO_NUMBERS = """
    __array_namespace_info__ axis_index axis_size backend_names bartlett blackman broadcast_shapes cache_info can_cast
    checkpoint current_device device_count device_get devices diag_indices diag_indices_from disable_jit eval_shape explain finfo
    free_cache fromfunction geomspace get_mesh hamming hanning identity iinfo indices isdtype kaiser load load_safetensors
    local_device_count local_devices logspace make_array_from_callback make_array_from_process_local_data
    make_array_from_single_device_arrays make_mesh mask_indices memory_info min_scalar_type num_shards num_threads
    process_count process_index promote_types ravel_multi_index register_pytree_node reset_peak_memory save save_safetensors savez savez_compressed
    set_cache_limit set_num_devices simulate transfer_guard transfers tri tril_indices tril_indices_from triu_indices
    triu_indices_from typeof unravel_index use_mesh visualize_sharding
"""
"""Functions that take no arrays of floating-point numbers, or return none."""


def test_every_public_function_has_an_entry() -> None:
    """A function is an operator that `test_operators` tests, or that is declared as discrete or refused; or it is in
    one of the tables above.
    """
    public = {n for n in st.__all__ if callable(getattr(st, n)) and not inspect.isclass(getattr(st, n))}
    operators = {n for n in public if n in OPS and OPS[n].dispatch is getattr(st, n)}
    tested = set(DIFFERENTIATED) | {n for n in operators if class_of(n) in ("zero", "refused", "creation", "missing")}
    entries = {*CASES, *REFUSED, *DISCRETE, *f"{ELSEWHERE} {NO_NUMBERS}".split()}
    assert public - tested - entries == {"asarray", "full", "full_like"}  # `test_grad` and all others call these.


def arguments(given: Any, spec: st.P, backend: str = "numpy") -> list[Any]:
    return [put(x, backend, spec=spec) if np.ndim(x) else st.asarray(x) for x in given]


@everywhere
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("name", sorted(CASES))
def test_gradients_of_functions(name: str, backend: str) -> None:
    for fn, given in CASES[name]:
        for spec in (st.P("x"), st.P())[: drawn(2, fast=1)]:
            xs = arguments(given, spec, backend)
            check_gradients(weighted(fn), xs, range(len(xs)))
    if name not in UNTRACED:
        argnums = tuple(range(len(xs)))
        g = st.grad(weighted(fn), argnums=argnums)
        for found, wanted, inferred in zip(st.jit(g)(*xs), g(*xs), st.eval_shape(g, *xs), strict=True):
            assert (inferred.shape, inferred.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-10, atol=1e-12)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("name", sorted(CASES))
def test_other_layouts_and_dtypes(name: str) -> None:
    mesh = st.make_mesh((4, 2), ("x", "y"))
    for fn, given in CASES[name]:
        argnums = tuple(range(len(given)))
        wanted = st.grad(weighted(fn), argnums=argnums)(*arguments(given, st.P("x")))
        for single, *specs in ((False, st.P("y", "x"), st.P(("x", "y"))), (True, st.P(None, "y"), st.P("y"))):
            xs = [np.asarray(x) for x in given]
            xs = [x.astype("complex64" if x.dtype.kind == "c" else "float32") if single else x for x in xs]
            xs = [st.device_put(x, st.NamedSharding(mesh, specs[x.ndim < 2] if x.ndim else st.P())) for x in xs]
            found, limit = st.grad(weighted(fn, single=single), argnums=argnums)(*xs), 2e-3 if single else 1e-10
            for x, g, w in zip(xs, found, wanted, strict=True):
                assert (g.dtype, g.sharding) == (x.dtype, x.sharding)
                scale = 1 + float(np.abs(np.asarray(w)).max())
                np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=limit, atol=limit * scale)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("name", sorted(set(CASES) - {"angle", "nan_to_num"}))
def test_second_derivatives_of_functions(name: str) -> None:
    rng = np.random.default_rng(1)
    for fn, given in CASES[name]:
        xs = arguments(given, st.P("x"))
        argnums, f = tuple(range(len(xs))), weighted(fn)
        ds = [direction(x, rng) for x in xs]

        def along(*xs: Any, f: Any = f, argnums: Any = argnums, ds: Any = ds) -> Any:
            return sum([(g * d).sum() for g, d in zip(st.grad(f, argnums=argnums)(*xs), ds, strict=True)])

        found = sum(float((np.asarray(g) * d).sum()) for g, d in zip(st.grad(along, argnums)(*xs), ds, strict=True))
        wanted = slope(along, xs, ds, 1e-5)
        assert abs(found - wanted) <= 2e-5 * (1 + abs(wanted))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_functions_without_derivatives(name: str) -> None:
    fn, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        st.grad(lambda x: (fn(x) * 1.0).sum())(put(Y, "numpy"))
    assert isinstance(caught.value, st.ShardTensorError)


@everywhere
def test_random_numbers_by_their_parameters(backend: str) -> None:
    """The derivative is that at the same probability, as in JAX: other numbers are drawn for other parameters."""
    jax = pytest.importorskip("jax")
    key = st.random.key(3)
    a = put(np.array([0.05, 0.5, 1.0, 2.7, 30.0, 500.0, 3e4]), backend)
    y, pull = st.vjp(lambda a: st.random.gamma(key, a), a)
    with jax.enable_x64(True):
        wanted = jax.lax.random_gamma_grad(np.asarray(a), np.asarray(y))
    np.testing.assert_allclose(np.asarray(pull(np.ones(7))[0]), np.asarray(wanted), rtol=1e-9)
    assert st.jit(st.grad(lambda a: st.random.gamma(key, a, (4,)).sum()))(2.5) > 0

    inf = np.inf
    ends = np.array([[-inf, inf], [-1, 2], [5, inf], [-8, -6], [-inf, 1], [-3, inf], [-inf, -5], [0.1, 0.2]]).T
    x, pull = st.vjp(lambda a, b: st.random.truncated_normal(key, a, b), *[put(e, backend) for e in ends])
    found = [np.asarray(g).tolist() for g in pull(np.ones(8))]
    for n, given in enumerate(zip(*ends.tolist(), np.asarray(x).tolist(), strict=True)):
        by_lower, by_upper, by_number = [
            slope_of(lambda d, k=k, given=given: probability(given, d, k)) for k in range(3)
        ]
        np.testing.assert_allclose(found[0][n], -by_lower / by_number, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(found[1][n], -by_upper / by_number, rtol=1e-6, atol=1e-12)
    second = st.grad(st.grad(lambda a: st.random.truncated_normal(key, a, 2.0, (5,)).sum()))
    first = st.grad(lambda a: st.random.truncated_normal(key, a, 2.0, (5,)).sum())
    assert np.isfinite(float(second(0.5)))
    assert 0 < float(first(0.5)) < 5


def probability(given: Sequence[float], d: float, k: int) -> float:
    """Returns the probability that a number of the truncated normal distribution is less than x, the last one of its
    ends and x, of which the k-th is changed by d.
    """
    lower, upper, x = [e + d * (i == k) for i, e in enumerate(given)]

    def between(a: float, b: float) -> float:
        a, b = (a, b) if a > 0 else (-b, -a)  # Probabilities of the upper tail are small numbers.
        return math.erfc(a / 2**0.5) - math.erfc(b / 2**0.5)

    return between(lower, x) / between(lower, upper)


def slope_of(fn: Callable[[float], float], step: float = 1e-4) -> float:
    return (8 * (fn(step) - fn(-step)) - fn(2 * step) + fn(-2 * step)) / (12 * step)


@pytest.mark.parametrize("name", sorted(DISCRETE))
def test_discrete_functions(name: str) -> None:
    x = put(X, "numpy")
    try:
        g = st.grad(lambda x: (DISCRETE[name](x), (x * x).sum())[1])(x)
    except st.ShardTensorError as error:
        assert name in UNEQUAL, error  # noqa: PT017
    else:
        np.testing.assert_allclose(np.asarray(g), 2 * X)


UNEQUAL = ("intersect1d", "setdiff1d", "setxor1d", "union1d")
"""Functions whose results are elements, of which equal ones are left out."""


NUMBERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "asarray": (lambda x, a: st.asarray([a, [a * a][0], 2.0]), True),
    "clip": (lambda x, a: st.clip(x, -a / 2, a), True),
    "full": (lambda x, a: st.full((3,), a), True),
    "full_like": (lambda x, a: st.full_like(x, a), True),
    "nan_to_num": (lambda x, a: st.nan_to_num(st.where(MASK, np.nan, x), nan=a), True),
    "max": (lambda x, a: st.max(x, axis=0, initial=a), True),
    "sum": (lambda x, a: st.sum(x, axis=0, initial=a), True),
    "select": (lambda x, a: st.select([MASK], [x], a), True),
    "unwrap": (lambda x, a: st.unwrap(9 * x, axis=0, period=a), True),
    "quantile": (lambda x, a: st.quantile(x, a), True),
    "heaviside": (lambda x, a: st.heaviside(x, a), True),
    "where": (lambda x, a: st.where(MASK, x, a), True),
    "pad": (lambda x, a: st.pad(x, 2, constant_values=a), False),
    "linspace": (lambda x, a: st.linspace(a, 2 * a, 5), False),
    "arange": (lambda x, a: st.arange(a, 2.5, 0.3), False),
    "interp": (lambda x, a: st.interp(x, [0, 1.0], [2, 3.0], left=a), False),
    "gradient": (lambda x, a: st.gradient(x, a), False),
    "std": (lambda x, a: st.std(x, correction=a), False),
    "kaiser": (lambda x, a: st.kaiser(5, a), False),
    "a list": (lambda x, a: np.asarray([a, a]) * x[:, :2], False),
    "a list of coefficients": (lambda x, a: st.polyval([a, 1.0], x), False),
    "a host array": (lambda x, a: np.asarray(a) * x, False),
}
"""Functions of a matrix and a number, and whether the gradient of the number is computed: others refuse it, as they take
a Python number, and none loses it.
"""


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_numbers_as_arguments(name: str) -> None:
    fn, is_computed = NUMBERS[name]
    xs = arguments((X, 0.7), st.P("x"))
    if is_computed:
        check_gradients(weighted(fn), xs, [0, 1])
        return
    with pytest.raises(st.ConcretizationError, match=r"its gradient would be lost.*st\.stop_gradient\(x\)"):
        st.grad(weighted(fn), argnums=1)(*xs)
