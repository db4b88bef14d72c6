"""The derivatives of linear algebra: factorizations, inverses, solutions of equations, eigenvalues, singular values.

The formulas are those of M. B. Giles (Collected matrix derivative results for forward and reverse mode algorithmic
differentiation, 2008), for Cholesky factors of I. Murray (Differentiation of the Cholesky decomposition, 2016), for QR
factors of S. F. Walter and L. Lehmann (Algorithmic differentiation of linear algebra functions with application in
optimum experimental design, 2010) and of J. Townsend (Differentiating the QR decomposition, 2018), for singular vectors
of J. Townsend (Differentiating the singular value decomposition, 2016), for pseudo-inverses of G. H. Golub and V.
Pereyra (The differentiation of pseudo-inverses and nonlinear least squares problems, 1973). As in JAX:

- The operand of `cholesky`, `eigh` and `eigvalsh` counts as the mean of x and of its conjugate transpose, so that the
  gradient is symmetric or Hermitian, although only one triangle of x is read.
- Eigenvectors and singular vectors are unique up to a sign or a phase, and so are the columns of Q. The derivatives are
  those of functions for which this makes no difference; likewise for the columns of U, Vh and Q that complete a basis,
  which are unique up to a rotation. The eigenvectors of `eig` have the length 1 and a real greatest element.
- Eigenvectors and singular vectors of equal eigenvalues or singular values have no derivatives: they are not finite.

Factorizations of matrices that are split are called again for the gradient, so that it is computed by the same
distributed algorithms. By JAX's convention, cotangents of complex numbers are conjugated: most rows are written without
it, and `_conjugated` adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import shardtensor.functions.derivatives.of_reductions  # noqa: F401 - it has the rows of vector_norm and matrix_rank
from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, unbroadcast, whole
from shardtensor.functions.derivatives.forms import Derivative, rows, vjp
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import shape_of


def _conj(x: Any) -> Any:
    return call("conj", x) if x.dtype.kind == "c" else x


def _transpose(x: Any) -> Any:
    return call("matrix_transpose", x)


def _adjoint(x: Any) -> Any:
    return _conj(_transpose(x))


def _product(*factors: Any) -> Any:
    """Returns the product of matrices, from the left to the right."""
    first, *others = factors
    for x in others:
        first = call("matmul", first, x)
    return first


def _columns(x: Any) -> Any:
    """Returns numbers by which the columns of a matrix are multiplied."""
    return call("expand_dims", x, axis=-2)


def _identity(x: Any, dtype: Any = bool) -> Any:
    """Returns the identity matrix of the size of x's last dimension, on every device."""
    return call("eye", x.shape[-1], dtype=dtype, device=x.sharding.with_spec(P()))


def _numbers(x: Any) -> Any:
    """Returns the numbers of the rows of matrices, as a column."""
    return call("arange", x.shape[-2], device=x.sharding.with_spec(P()))[:, None]


def _with_diagonal(diagonal: Any, x: Any) -> Any:
    """Returns matrices with another diagonal."""
    return call("where", _identity(x), _columns(diagonal), x)


def _reciprocal_differences(x: Any) -> Any:
    """Returns the matrix of 1 / (x[j] - x[i]), with the diagonal 1."""
    return 1 / call("where", _identity(x), 1, _columns(x) - call("expand_dims", x, axis=-1))


def _conjugated(function: Callable[[Sequence[Any], Call], Any], *saved: str) -> Derivative:
    """Returns the derivative of an operator, of which nothing is conjugated.

    Args:
        function: a function of a list of the cotangents of all results, None for those that have none, and of the call;
            it returns the cotangent of the first operand, or a list with one for each of the first operands.
        saved: see `vjp`.
    """

    def transposed(g: Any, recorded: Call) -> Any:
        if 0 in shape_of(recorded.kinds[0]):
            return None
        gs = g if type(g) is list else [g]
        pairs = zip(gs, recorded.results, strict=True)
        result = function([None if g is None else _conj(whole(g, kind)) for g, kind in pairs], recorded)
        cotangents = result if type(result) is list else [result]
        return [None if g is None else _conj(g) for g in cotangents] + [None] * (len(recorded.kinds) - len(cotangents))

    return vjp(transposed, *saved)


# -- equations and determinants --------------------------------------------------------------------


def _of_inverse(g: Any, recorded: Call) -> Any:
    y = _transpose(recorded.saved["y"])
    return _product(-y, whole(g, recorded.results[0]), y)


def _of_solution(g: Any, recorded: Call) -> list[Any]:
    """Solves the transposed equations, and multiplies their solutions by those of the equations."""
    x1, y = recorded.saved["x1"], recorded.saved["y"]
    g, is_vector = whole(g, recorded.results[0]), len(shape_of(recorded.kinds[1])) == 1
    columns = call("expand_dims", g, axis=-1) if is_vector else g
    solution = call("solve", _transpose(x1), columns)
    solution = call("squeeze", solution, axis=-1) if is_vector else solution
    of_matrix = None
    if recorded.active[0]:
        ndim, stack = len(shape_of(recorded.kinds[0])), solution.shape[: solution.ndim - 2 + is_vector]
        names = [f"s{d}" for d in range(len(stack))]
        kept, k = names[len(names) + 2 - ndim :] if ndim > 2 else [], [] if is_vector else ["k"]
        text = [" ".join(term) for term in ([*names, "i", *k], [*names, "j", *k], [*kept, "i", "j"])]
        shape = (*stack[len(names) - len(kept) :], *shape_of(x1)[-2:])
        number = 0 if shape == shape_of(recorded.kinds[0]) else -1
        rule = f"{text[0]}, {text[1]} -> {text[2]}"
        of_matrix = unbroadcast(recorded.add_up(number, "contract", -solution, y, rule=rule), recorded, 0, shape)
    return [of_matrix, unbroadcast(solution, recorded, 1, g.shape) if recorded.active[1] else None]


def _of_determinant(g: Any, recorded: Call) -> Any:
    """Multiplies the cotangent by the transposed adjugate, that is det(x) inv(x) unless x is singular.

    For any vectors u and v, and n = x + u vᵀ, it is det(n) ((1 - vᵀ inv(n) u) inv(n) + inv(n) u vᵀ inv(n)), by the
    formula of Sherman and Morrison. Unless x is singular, u is zero. If n is nearly singular, too, so that the rank of
    x is less by two than its size, the adjugate is zero.
    """
    x, y = recorded.saved["x"], recorded.saved["y"]
    size = x.shape[-1]
    if 0 in x.shape:
        return None

    def of_each(number: Any) -> Any:
        return call("expand_dims", number, axis=(-2, -1))

    def greatest(x: Any) -> Any:
        return call("max", call("abs", x), axis=(-2, -1))

    is_singular = y == 0
    scale = call("where", is_singular, greatest(x), 0)
    numbers = call("astype", _numbers(x), scale.dtype)
    u, v = of_each(scale) * call("cos", numbers + 1), _transpose(call("cos", 2 * numbers + 1))
    changed = x + u * v
    number = of_each(call("det", changed))
    inverse = call("inv", call("where", number == 0, _identity(x, x.dtype), changed))
    left, right = _product(inverse, u), _product(v, inverse)
    adjugate = number * ((1 - _product(v, left)) * inverse + left * right)
    condition = greatest(changed) * greatest(inverse) * (size * float(np.finfo(scale.dtype).eps))
    adjugate = call("where", of_each(call("logical_and", is_singular, condition > 0.1)), 0, adjugate)
    return of_each(whole(g, recorded.results[0])) * _transpose(adjugate)


def _of_logarithm(g: Any, recorded: Call) -> Any:
    """Adds to the cotangent of the logarithm that of the angle of the sign, which real numbers do not have."""
    x, (sign, _) = recorded.saved["x"], recorded.saved["y"]
    factor, of_sign = g[1], g[0]
    if sign.dtype.kind == "c" and of_sign is not None:
        angle = call("imag", of_sign * sign) * 1j
        factor = angle if factor is None else factor + angle
    if factor is None:
        return None
    factor = whole(factor, recorded.results[0])
    return call("expand_dims", factor, axis=(-2, -1)) * _transpose(call("inv", x))


def _of_pseudo_inverse(g: Sequence[Any], recorded: Call) -> Any:
    x, y, rtol = [recorded.saved[n] for n in ("x", "y", "rtol")]
    if rtol is not None:
        return _of_cut_inverse(_adjoint(g[0]), None, x, rtol)
    if x.shape[-2] < x.shape[-1]:
        return _adjoint(_of_tall_pseudo_inverse(_adjoint(g[0]), _adjoint(x), _adjoint(y)))
    return _of_tall_pseudo_inverse(g[0], x, y)


def _of_cut_inverse(g: Any, g_values: Any, x: Any, rtol: Any) -> Any:
    """Returns the cotangent of x, of which small singular values count as zero, given that of the adjoint of the
    pseudo-inverse and that of the singular values.

    The adjoint is f(x), where f has the values 1 / s or 0. The derivatives of functions of singular values have the
    divided differences of f, which are finite, as factors.
    """
    left, s, right = call("svd", x, full_matrices=False)
    right, limit = _adjoint(right), call("max", s, axis=-1, keepdims=True) * _last(rtol)
    f = call("where", s > limit, 1 / call("where", s > limit, s, 1), 0)
    rows, columns, large = _last(s), _columns(s), _columns(f) * _last(f)
    # If no value is cut off, the quotient of the differences of 1 / s and of s is known, also of equal values.
    is_cut = large == 0
    difference = call("where", is_cut, rows - columns, 1)
    falls = (_last(f) - _columns(f)) / call("where", difference == 0, 1, difference)
    falls = call("where", is_cut, falls, -large)
    total = rows + columns
    rises = (_last(f) + _columns(f)) / call("where", total == 0, 1, total)
    inner = _product(_adjoint(left), g, right)
    middle = (falls * (inner + _adjoint(inner)) + rises * (inner - _adjoint(inner))) / 2
    if g_values is not None:
        middle = middle + call("where", _identity(s), _columns(g_values), 0)
    result = _product(left, middle, _adjoint(right))
    if x.shape[-2] > x.shape[-1]:
        result = result + _product((_product(g, right) - _product(left, inner)) * _columns(f * f), _adjoint(right))
    elif x.shape[-2] < x.shape[-1]:
        more = _product(_adjoint(left), g) - _product(inner, _adjoint(right))
        result = result + _product(left * _columns(f * f), more)
    return result


def _last(x: Any) -> Any:
    """Returns the numbers of a stack, or those by which the rows of matrices are multiplied, as columns."""
    return call("expand_dims", x, axis=-1) if getattr(x, "ndim", 0) else x


def _of_tall_pseudo_inverse(g: Any, x: Any, y: Any) -> Any:
    """Returns the cotangent of x, of which no product has more than x's columns on both sides."""
    g, adjoint = _adjoint(g), _adjoint(y)
    k = _product(y, g)
    return _product(adjoint, k - _adjoint(k) - _product(k, _product(y, x))) + _product(
        g - _product(x, k), _product(y, adjoint)
    )


def _of_least_squares(g: Sequence[Any], recorded: Call) -> Any:
    """Differentiates the product of the pseudo-inverse of a and of b, so that singular values may be equal."""
    a, b, rcond = recorded.saved["a"], recorded.saved["b"], recorded.params["rcond"]
    (solution, _, _), (g_solution, _, g_values) = recorded.saved["y"], g
    if g_solution is None:
        return [_of_singular_values(g_values, a), None]
    rtol = float(np.finfo(solution.dtype).eps) if rcond == -1 else rcond
    inverse = call("pinv", a, rtol=rtol)
    adjoint = _adjoint(inverse)
    g_right = _product(adjoint, g_solution)
    if not recorded.active[0]:
        return [None, g_right]
    if rcond not in (None, -1):
        return [_of_cut_inverse(_product(b, _adjoint(g_solution)), g_values, a, rtol), g_right]
    rest, others = b - _product(a, solution), g_solution - _product(inverse, a, g_solution)
    g_matrix = _product(rest, _adjoint(_product(inverse, g_right))) - _product(g_right, _adjoint(solution))
    g_matrix = g_matrix + _product(adjoint, solution, _adjoint(others))
    return [g_matrix if g_values is None else g_matrix + _of_singular_values(g_values, a), g_right]


# -- factorizations --------------------------------------------------------------------------------


def _of_cholesky(g: Sequence[Any], recorded: Call) -> Any:
    factor, g_factor = recorded.saved["y"], g[0]
    upper = factor if recorded.params["upper"] else _adjoint(factor)
    g_lower = _adjoint(g_factor) if recorded.params["upper"] else g_factor
    middle = _mean_of_triangle("tril", -1, _product(upper, g_lower))
    return call("solve", upper, _adjoint(call("solve", upper, middle))) / 2


def _mean_of_triangle(triangle: str, k: int, x: Any) -> Any:
    """Returns the Hermitian matrix that has a triangle of x, of which the diagonal is made real."""
    twice = call(triangle, x) + call(triangle, x, k=k)
    return (twice + _adjoint(twice)) / 2


def _of_qr(g: Sequence[Any], recorded: Call) -> Any:
    (q, r), (g_q, g_r) = recorded.saved["y"], g
    rows, columns = shape_of(recorded.kinds[0])[-2:]
    g_q = _zeros_like(q) if g_q is None else g_q
    g_r = _zeros_like(r) if g_r is None else g_r
    if rows < columns:
        # The columns of x behind the square ones are Q times those of R.
        rest, g_rest = r[..., rows:], g_r[..., rows:]
        first = _of_square_qr(g_q + _product(q, rest, _adjoint(g_rest)), g_r[..., :rows], q, r[..., :rows])
        return call("concat", [first, _product(q, g_rest)], axis=-1)
    if q.shape[-1] > columns:
        g_q, q = _of_basis(g_q, q, columns), q[..., :columns]
        r, g_r = r[..., :columns, :], g_r[..., :columns, :]
    return _of_square_qr(g_q, g_r, q, r)


def _zeros_like(x: Any) -> Any:
    return call("zeros_like", x)


def _of_square_qr(g_q: Any, g_r: Any, q: Any, r: Any) -> Any:
    """Returns the cotangent of a matrix whose factor R is square."""
    middle = _mean_of_triangle("triu", 1, _product(g_r, _adjoint(r)) - _product(_adjoint(q), g_q))
    return _adjoint(call("solve", r, _adjoint(g_q + _product(q, middle))))


def _of_basis(g: Any, q: Any, count: int) -> Any:
    """Returns the cotangent of the first columns of an orthonormal basis, on which the space of the others depends."""
    first, others = q[..., :count], q[..., count:]
    return g[..., :count] - _product(others, _adjoint(_product(_adjoint(first), g[..., count:])))


# -- eigenvalues and singular values ---------------------------------------------------------------


def _of_eigh(g: Sequence[Any], recorded: Call) -> Any:
    (values, vectors), (g_values, g_vectors) = recorded.saved["y"], g
    adjoint = _adjoint(vectors)
    if g_vectors is None:
        return _product(vectors * _columns(g_values), adjoint)
    middle = _product(adjoint, g_vectors) * _reciprocal_differences(values)
    middle = _with_diagonal(0 * values if g_values is None else g_values, (middle + _adjoint(middle)) / 2)
    return _product(vectors, middle, adjoint)


def _of_eigvalsh(g: Sequence[Any], recorded: Call) -> Any:
    vectors = call("eigh", recorded.saved["x"]).eigenvectors
    return _product(vectors * _columns(g[0]), _adjoint(vectors))


def _of_eig(g: Sequence[Any], recorded: Call) -> Any:
    return _of_eigenvectors(g[0], g[1], *recorded.saved["y"])


def _of_eigvals(g: Sequence[Any], recorded: Call) -> Any:
    return _of_eigenvectors(g[0], None, *call("eig", recorded.saved["x"]))


def _of_eigenvectors(g_values: Any, g_vectors: Any, values: Any, vectors: Any) -> Any:
    adjoint = _adjoint(vectors)
    if g_vectors is None:
        return call("solve", adjoint, call("expand_dims", g_values, axis=-1) * adjoint)
    # Vectors have the length 1, and their greatest element is real: they change by no multiple of themselves.
    along = call("sum", _conj(vectors) * g_vectors, axis=-2, keepdims=True)
    size = call("where", call("imag", vectors) == 0, call("abs", vectors), 0)
    is_real = _numbers(size) == _columns(call("argmax", size, axis=-2))
    angles = call("where", is_real, call("imag", along) / call("where", is_real, call("real", vectors), 1), 0)
    g_vectors = g_vectors - call("real", along) * vectors - 1j * angles
    middle = _product(adjoint, g_vectors) * _conj(_reciprocal_differences(values))
    middle = _with_diagonal(0 * values if g_values is None else g_values, middle)
    return call("solve", adjoint, _product(middle, adjoint))


def _of_svd(g: Sequence[Any], recorded: Call) -> Any:
    (left, values, right), (g_left, g_values, g_right) = recorded.saved["y"], g
    right, g_right = _adjoint(right), None if g_right is None else _adjoint(g_right)
    count = values.shape[-1]
    if left.shape[-1] > count:
        g_left, left = None if g_left is None else _of_basis(g_left, left, count), left[..., :count]
    if right.shape[-1] > count:
        g_right, right = None if g_right is None else _of_basis(g_right, right, count), right[..., :count]
    return _of_singular_vectors(g_left, g_values, g_right, left, values, right)


def _of_singular_vectors(g_left: Any, g_values: Any, g_right: Any, left: Any, values: Any, right: Any) -> Any:
    """Returns the cotangent of x = left diag(values) rightᴴ."""
    adjoint, row = _adjoint(right), _columns(values)
    if g_left is None and g_right is None:
        return _product(left * _columns(g_values), adjoint)
    factors = _reciprocal_differences(values) / (row + _transpose(row))
    middle, diagonal = 0, 0 * values if g_values is None else g_values
    more = []
    if g_left is not None:
        inner = _product(_adjoint(left), g_left)
        middle = middle + (inner - _adjoint(inner)) * factors * row
        if inner.dtype.kind == "c":
            turned = call("imag", call("diagonal", inner, axis1=-2, axis2=-1))
            diagonal = diagonal + 1j * (turned / call("where", values == 0, 1, values))
        if left.shape[-2] > left.shape[-1]:
            more.append(_product((g_left - _product(left, inner)) / row, adjoint))
    if g_right is not None:
        inner = _product(_adjoint(right), g_right)
        middle = middle + _transpose(row) * (inner - _adjoint(inner)) * factors
        if right.shape[-2] > right.shape[-1]:
            more.append(_product(left, _adjoint((g_right - _product(right, inner)) / row)))
    total = _product(left, _with_diagonal(diagonal, middle), adjoint)
    for part in more:
        total = total + part
    return total


def _of_svdvals(g: Sequence[Any], recorded: Call) -> Any:
    return _of_singular_values(g[0], recorded.saved["x"])


def _of_singular_values(g: Any, x: Any) -> Any:
    left, _, right = call("svd", x, full_matrices=False)
    return _product(left * _columns(g), right)


rows(
    cholesky=_conjugated(_of_cholesky, "y"),
    det=vjp(_of_determinant, "x", "y"),
    eig=_conjugated(_of_eig, "y"),
    eigh=_conjugated(_of_eigh, "y"),
    eigvals=_conjugated(_of_eigvals, "x"),
    eigvalsh=_conjugated(_of_eigvalsh, "x"),
    inv=vjp(_of_inverse, "y"),
    least_squares=_conjugated(_of_least_squares, "a", "b", "y"),
    pinv=_conjugated(_of_pseudo_inverse, "x", "rtol", "y"),
    qr=_conjugated(_of_qr, "y"),
    slogdet=vjp(_of_logarithm, "x", "y"),
    solve=vjp(_of_solution, "x1", "y"),
    svd=_conjugated(_of_svd, "y"),
    svdvals=_conjugated(_of_svdvals, "x"),
)
