"""Programs of array-api-compat and array-api-extra, which recognize the namespaces of a few libraries only."""

from __future__ import annotations

import pytest

from tests.clients.programs import Program, compared, numbers, on_meshes

xpx = pytest.importorskip("array_api_extra", reason="array-api-extra is not installed: see the extra `test`")
compat = pytest.importorskip("array_api_compat", reason="array-api-compat is not installed: see the extra `test`")

VECTOR, OTHER, TABLE = numbers(37), numbers(37, seed=2), numbers(19, 7)
WHOLE = numbers(37, dtype="int64")

PROGRAMS: dict[str, tuple[Program, ...]] = {
    "at set": (lambda xp, x: xpx.at(x)[1:9].set(3.0), VECTOR),
    "at add mask": (lambda xp, x: xpx.at(x, x > 0).add(3.0), VECTOR),
    "at copy": (lambda xp, x: [xpx.at(x)[::2].multiply(2.0, copy=True), xpx.at(x)[3].min(0.0, copy=True), x], VECTOR),
    "at 0-d": (lambda xp, x: xpx.at(xp.sum(x), xp.sum(x) < 1e9).set(xp.nan), VECTOR),
    "apply_where": (lambda xp, x, y: xpx.apply_where(x > 0, (x, y), lambda a, b: a / b, lambda a, b: a - b), VECTOR, OTHER),
    "apply_where fill": (lambda xp, x: xpx.apply_where(x > 0, x, xp.log, fill_value=xp.nan), VECTOR),
    "atleast_nd": (lambda xp, x: xpx.atleast_nd(x, ndim=4), TABLE),
    "cov": (lambda xp, x: xpx.cov(x.T), TABLE),
    "create_diagonal": (lambda xp, x: xpx.create_diagonal(x, offset=-2), VECTOR),
    "isclose": (lambda xp, x: xpx.isclose(x, x + 1e-9), TABLE),
    "isin": (lambda xp, x: xpx.isin(x, x[:5], invert=True), WHOLE),
    "kron": (lambda xp, x, y: xpx.kron(x, y[:3]), TABLE, OTHER),
    "nan_to_num": (lambda xp, x: xpx.nan_to_num(xp.where(x > 0, x, xp.nan)), TABLE),
    "nunique": (lambda xp, x: xpx.nunique(x), WHOLE),
    "one_hot": (lambda xp, x: xpx.one_hot(x % 5, 5), WHOLE),
    "pad": (lambda xp, x: xpx.pad(x, ((1, 2), (3, 0)), constant_values=2.0), TABLE),
    "partition": (lambda xp, x: xp.sort(xpx.partition(x, 7)[:7]), VECTOR),
    "setdiff1d": (lambda xp, x: xpx.setdiff1d(x, x[:5]), WHOLE),
    "union1d": (lambda xp, x: xpx.union1d(x, x[:5] + 7), WHOLE),
    "sinc": (lambda xp, x: xpx.sinc(x), TABLE),
    "to_device": (lambda xp, x: compat.to_device(x, compat.device(x)), TABLE),
    "sizes": (lambda xp, x: [compat.size(x), compat.is_lazy_array(x), compat.is_writeable_array(x)], TABLE),
}  # fmt: skip


@on_meshes
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_numpys_and_tensors(name: str, count: int) -> None:
    compared(*PROGRAMS[name], count=count)


def test_the_namespace_is_the_package_itself() -> None:
    import shardtensor as st

    assert compat.array_namespace(st.zeros(3), 2.0) is st
    assert compat.is_array_api_obj(st.zeros(3))
