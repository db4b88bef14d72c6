"""Programs of SciPy's functions that take arrays of any namespace, with `SCIPY_ARRAY_API=1` (see `tests.conftest`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.clients.programs import Program, compared, lazily, numbers
from tests.layouts import put

cluster, differentiate, fft, integrate, ndimage, signal, special, stats = lazily(
    "scipy", "cluster", "differentiate", "fft", "integrate", "ndimage", "signal", "special", "stats"
)

VECTOR, OTHER, SHORT = numbers(37), numbers(37, seed=2), numbers(9, seed=3)
TABLE, POSITIVE, COMPLEX = numbers(19, 7), abs(numbers(19, 7, seed=1)) + 0.1, numbers(19, 7, dtype="complex128")


def each(functions: Any, names: str, *arrays: np.ndarray) -> dict[str, tuple[Program, ...]]:
    """One program for each function, called with the arrays."""
    module = functions.__name__.removeprefix("scipy.")
    return {f"{module}.{n}": (lambda xp, *xs, n=n: getattr(functions, n)(*xs), *arrays) for n in names.split()}


def hypothesis_test(name: str, *arrays: np.ndarray, **params: Any) -> dict[str, tuple[Program, ...]]:
    """One program: statistic and p-value of a test."""
    return {f"stats.{name}": (lambda xp, *xs: tuple(getattr(stats, name)(*xs, **params)), *arrays)}


FFT: dict[str, tuple[Program, ...]] = {
    **each(fft, "fft ifft fft2 ifft2 fftn ifftn irfft irfftn hfft", COMPLEX),
    **each(fft, "rfft rfft2 rfftn ihfft fftshift ifftshift dct idct dst dctn", TABLE),
    "fft.fft axis": (lambda xp, x: fft.fft(x, axis=0, n=16, norm="ortho"), COMPLEX),
    "fft.fftfreq": (lambda xp, x: fft.fftfreq(11, xp=xp), VECTOR),
    "fft.fht": (lambda xp, x: fft.fht(x, 0.1, mu=2.0), VECTOR),
}

STATS: dict[str, tuple[Program, ...]] = {
    **each(stats, "skew kurtosis variation sem tmean tvar tstd gmean hmean zscore gzscore kstat entropy describe", POSITIVE),
    **each(stats, "differential_entropy iqr median_abs_deviation circmean circvar circstd lmoment moment", POSITIVE),
    **hypothesis_test("pearsonr", VECTOR, OTHER),
    **hypothesis_test("kendalltau", VECTOR, OTHER),
    **hypothesis_test("ttest_1samp", TABLE, popmean=0.1),
    **hypothesis_test("ttest_ind", TABLE, POSITIVE, equal_var=False),
    **hypothesis_test("ttest_rel", TABLE, POSITIVE),
    **hypothesis_test("mannwhitneyu", VECTOR, OTHER),
    **hypothesis_test("wilcoxon", VECTOR, OTHER),
    **hypothesis_test("f_oneway", TABLE, POSITIVE),
    **hypothesis_test("kruskal", VECTOR, OTHER),
    **hypothesis_test("bartlett", VECTOR, OTHER),
    **hypothesis_test("normaltest", VECTOR),
    **hypothesis_test("jarque_bera", VECTOR),
    **hypothesis_test("chisquare", POSITIVE),
    **hypothesis_test("linregress", VECTOR, OTHER),
    "stats.rankdata": (lambda xp, x: stats.rankdata(x, axis=0), TABLE),
    "stats.quantile": (lambda xp, x: stats.quantile(x, xp.asarray([0.1, 0.5])), VECTOR),
    "stats.combine_pvalues": (lambda xp, x: tuple(stats.combine_pvalues(abs(x) / 10)), VECTOR),
    "stats.permutation_test": (
        lambda xp, x, y: stats.permutation_test(
            (x, y), lambda a, b, axis=-1: xp.mean(a, axis=axis) - xp.mean(b, axis=axis),
            n_resamples=20, rng=1, vectorized=True,
        ).pvalue,
        VECTOR, OTHER,
    ),
}  # fmt: skip

SPECIAL: dict[str, tuple[Program, ...]] = {
    **each(special, "erf erfc expit gammaln i0 i0e log_ndtr ndtr entr logit logsumexp softmax log_softmax", POSITIVE),
    **each(special, "rel_entr kl_div xlogy gammainc gammaincc betaln chdtrc", POSITIVE, POSITIVE + 1),
    "special.logsumexp b": (lambda xp, x: special.logsumexp(x, b=x + 1, axis=1, return_sign=True), TABLE),
}

SIGNAL: dict[str, tuple[Program, ...]] = {
    **each(signal, "oaconvolve fftconvolve convolve correlate", VECTOR, SHORT),
    **each(signal, "convolve2d correlate2d", TABLE, POSITIVE[:3, :3]),
    **each(signal, "hilbert detrend", TABLE),
    "signal.oaconvolve rows": (lambda xp, x, k: signal.oaconvolve(x, k, axes=1), numbers(7, 500), numbers(7, 13)),
    "signal.oaconvolve same": (lambda xp, x, k: signal.oaconvolve(x, k, mode="same"), numbers(5000), numbers(31)),
    "signal.resample": (lambda xp, x: signal.resample(x, 50), VECTOR),
    "signal.resample_poly": (lambda xp, x: signal.resample_poly(x, 3, 2), VECTOR),
    "signal.lfilter": (lambda xp, x, k: signal.lfilter(k, xp.asarray([1.0, 0.2]), x), VECTOR, SHORT),
    "signal.savgol_filter": (lambda xp, x: signal.savgol_filter(x, 5, 2), VECTOR),
    "signal.windows": (lambda xp, x: [signal.get_window(w, 11, xp=xp) for w in ("hann", ("kaiser", 3.0))], VECTOR),
}

OTHERS: dict[str, tuple[Program, ...]] = {
    "cluster.whiten": (lambda xp, x: cluster.vq.whiten(x), TABLE),
    "cluster.kmeans": (lambda xp, x: cluster.vq.kmeans(x, x[:3]), TABLE),
    "cluster.linkage": (lambda xp, x: cluster.hierarchy.linkage(x, "ward"), TABLE),
    "cluster.fcluster": (
        lambda xp, x: cluster.hierarchy.fcluster(cluster.hierarchy.linkage(x, "ward"), 3, "maxclust"), TABLE
    ),
    "ndimage.gaussian_filter": (lambda xp, x: ndimage.gaussian_filter(x, 1.2), TABLE),
    "ndimage.median_filter": (lambda xp, x: ndimage.median_filter(x, 3), TABLE),
    "ndimage.zoom": (lambda xp, x: ndimage.zoom(x, 1.5), TABLE),
    "ndimage.label": (lambda xp, x: ndimage.label(x > 0), TABLE),
    "ndimage.sobel": (lambda xp, x: ndimage.sobel(x), TABLE),
    "integrate.trapezoid": (lambda xp, x: integrate.trapezoid(x, axis=0), TABLE),
    "integrate.cumulative_trapezoid": (lambda xp, x: integrate.cumulative_trapezoid(x, axis=0, initial=0), TABLE),
    "integrate.cumulative_simpson": (lambda xp, x: integrate.cumulative_simpson(x, dx=0.5), VECTOR),
    "integrate.tanhsinh": (lambda xp, x: integrate.tanhsinh(lambda t: xp.exp(-t * t), -abs(x), abs(x)).integral, SHORT),
    "integrate.cubature": (
        lambda xp, x: integrate.cubature(lambda t: xp.sum(t**2, axis=-1), xp.zeros(2), xp.asarray([1.0, 2.0])).estimate,
        VECTOR,
    ),
    "differentiate.derivative": (lambda xp, x: differentiate.derivative(xp.exp, x).df, SHORT),
    "differentiate.jacobian": (lambda xp, x: differentiate.jacobian(lambda t: t**2, x[:5]).df, SHORT),
}  # fmt: skip

PROGRAMS = FFT | STATS | SPECIAL | SIGNAL | OTHERS


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_numpys_and_tensors(name: str, count: int) -> None:
    compared(*PROGRAMS[name], count=count, rtol=1e-7)


def test_ufuncs_without_the_standard_run_in_maps() -> None:
    """SciPy has no form of `beta` for other arrays."""
    x, y = [put(array, "numpy", (3,)) for array in (POSITIVE, POSITIVE + 1)]
    for call in (lambda: special.beta(x, y), lambda: special.beta(x, 2.0), lambda: special.beta(POSITIVE, y)):
        with pytest.raises(
            TypeError, match=r"beta: is not a ufunc of NumPy, .*; st\.smap calls it on the part of each"
        ):
            call()
    with st.transfers() as log:
        found = st.smap(special.beta, x, y, devices=x.sharding.mesh)
    assert log.bytes == 0
    np.testing.assert_array_equal(np.asarray(found), special.beta(POSITIVE, POSITIVE + 1))
    np.testing.assert_array_equal(stats.beta.pdf(x / 9, y, 2.0), stats.beta.pdf(POSITIVE / 9, POSITIVE + 1, 2.0))
