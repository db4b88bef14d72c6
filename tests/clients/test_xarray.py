"""Programs of xarray with tensors as the data of its arrays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from tests.clients.programs import Program, compared, lazily, numbers

xr, pd = lazily("xarray"), lazily("pandas")

VALUE, COMPLEX = numbers(19, 7), numbers(19, 7, dtype="complex128")


def made(x: Any) -> Any:
    return xr.DataArray(x, dims=("t", "s"), coords={"t": np.arange(19), "s": list("abcdefg")}, name="x")


def data_of(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [data_of(r) for r in result]
    if isinstance(result, xr.Dataset):
        return {name: variable.data for name, variable in result.data_vars.items()}
    return result.data if isinstance(result, (xr.DataArray, xr.Variable)) else result


def assigned(d: Any, key: dict[str, Any], by_label: bool) -> Any:
    (d.loc if by_label else d)[key] = 5.0
    return d


def added(d: Any) -> Any:
    d += 2.0
    return d


def with_nan(d: Any) -> Any:
    return d.where(d > 0)


def centred(x: Any) -> Any:
    return x - x.mean(axis=-1, keepdims=True)


PROGRAMS: dict[str, Program] = {
    "arithmetic": lambda d: d * 2 + d**2 - d / 3,
    "comparison": lambda d: [d > 0, (d > 0) & (d < 1)],
    "numpy's functions": lambda d: [np.exp(d), np.maximum(d, 0)],
    "mean": lambda d: [d.mean("t"), d.mean("s"), d.mean()],
    "sum": lambda d: [d.sum("t"), with_nan(d).sum("s", skipna=True, min_count=1)],
    "extrema": lambda d: [d.min("t"), d.max("s"), d.argmax("t"), d.argmin("s")],
    "moments": lambda d: [d.std("t"), d.var("t", ddof=1), d.median("s"), d.prod("s")],
    "any and all": lambda d: [(d > 1).any("t"), (d > -9).all("s"), d.count("t")],
    "cumulative": lambda d: [d.cumsum("t"), d.cumprod("s"), d.cumulative_integrate("t")],
    "skipping NaN": lambda d: [with_nan(d).mean("s"), with_nan(d).std("t"), with_nan(d).max("t")],
    "quantile": lambda d: d.quantile([0.1, 0.5], "t"),
    "isel": lambda d: [d.isel(t=slice(2, 9), s=3), d.isel(t=[1, 5, 2], s=[0, 1]), d.isel(t=-1)],
    "sel": lambda d: [d.sel(s="c"), d.sel(t=slice(3, 8)), d.sel(t=[3.2, 7.7], method="nearest")],
    "where": lambda d: [d.where(d > 0), d.where(d > 0, -1), d.where(d.t > 5, drop=True)],
    "missing": lambda d: [with_nan(d).fillna(0), with_nan(d).isnull(), d.where(d.t > 3).dropna("t")],
    "clip and round": lambda d: [d.clip(-0.5, 0.5), d.round(2), d.astype("float32")],
    "transpose": lambda d: [d.T, d.transpose("s", "t"), d.expand_dims("n").squeeze("n")],
    "stack": lambda d: [d.stack(k=("t", "s")), d.stack(k=("t", "s")).unstack("k")],
    "concat": lambda d: [xr.concat([d, d], "t"), xr.concat([d, d], "n")],
    "align": lambda d: [d[2:] + d[:-3], *xr.align(d[2:], d[:-3], join="outer"), d.reindex(t=[0, 5, 30])],
    "shift": lambda d: [d.shift(t=2), d.roll(t=2), d.diff("t"), d.pad(t=(1, 2)), d.sortby("t", ascending=False)],
    "groupby": lambda d: [d.groupby(d.t % 3).mean(), d.groupby("t").sum()],
    "groupby map": lambda d: d.groupby(d.t % 3).map(lambda g: g - g.mean("t")),
    "groupby_bins": lambda d: d.groupby_bins("t", [0, 5, 10, 18]).mean(),
    "resample": lambda d: d.assign_coords(t=pd.date_range("2020", periods=19)).resample(t="5D").mean(),
    "coarsen": lambda d: d.coarsen(t=4, boundary="trim").mean(),
    "rolling": lambda d: [d.rolling(t=3).mean(), d.rolling(t=3, min_periods=1).max(), d.rolling(t=3).construct("w")],
    "weighted": lambda d: d.weighted(xr.DataArray(np.arange(19.0), dims="t")).mean("t"),
    "products": lambda d: [xr.dot(d, d, dim="s"), d @ d, xr.cov(d, d * 2, dim="t"), xr.corr(d, d**2, dim="t")],
    "calculus": lambda d: [d.integrate("t"), d.differentiate("t")],
    "apply_ufunc": lambda d: xr.apply_ufunc(centred, d, input_core_dims=[["t"]], output_core_dims=[["t"]]),
    "assignment": lambda d: [
        assigned(d.copy(), {"t": slice(1, 3)}, False), assigned(d.copy(), {"s": "b"}, True), added(d.copy())
    ],
    "dataset": lambda d: [xr.Dataset({"a": d, "b": d.mean("t")}).mean(), xr.Dataset({"a": d, "b": d * 2}) * 2 + 1],
    "merge": lambda d: [xr.merge([d, (d * 2).rename("b")]), xr.Dataset({"a": d, "b": d * 2}).to_array()],
    "copies": lambda d: [d.copy(deep=True), copy.deepcopy(d), pickle.loads(pickle.dumps(d))],
    "equality": lambda d: [d.equals(d.copy()), d.identical(d.copy()), d.equals(d + 1)],
    "broadcast": lambda d: xr.broadcast(d, xr.DataArray(np.arange(3), dims="q"))[0],
    "to the host": lambda d: [d.values.tolist(), d.as_numpy().data.tolist(), d.to_dataframe().to_numpy().tolist()],
    "display": lambda d: [len(repr(d)) > 0, len(d._repr_html_()) > 0],
    "metadata": lambda d: [d.nbytes, d.size, d.ndim, d.shape, d.sizes["t"], d[0, 0].item()],
    "variable": lambda d: xr.Variable(("a", "b"), d.data).mean("a"),
}  # fmt: skip


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_numpys_and_tensors(name: str, count: int) -> None:
    compared(lambda xp, x: data_of(PROGRAMS[name](made(x))), VALUE, count=count)


def test_complex_numbers() -> None:
    compared(lambda xp, x: data_of([made(x).real, made(x).conj(), abs(made(x))]), COMPLEX, count=3)
