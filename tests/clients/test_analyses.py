"""Whole analyses, as users of the libraries write them: each is the same function for NumPy's arrays and for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.clients.programs import compared, lazily, numbers

ndimage, signal, stats = lazily("scipy", "ndimage", "signal", "stats")
sklearn, xr, pd = lazily("sklearn", title="scikit-learn"), lazily("xarray"), lazily("pandas")
NAMES = ("decomposition", "linear_model", "metrics", "model_selection", "pipeline", "preprocessing")
decomposition, linear_model, metrics, model_selection, pipeline, preprocessing = lazily("sklearn", *NAMES)

# scikit-learn divides by zero on purpose, and ignores the warning for NumPy's arrays only.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")

on_meshes = pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.full)])


@on_meshes
def test_a_classifier_is_chosen_by_cross_validation(count: int) -> None:
    X = numbers(157, 11) @ numbers(11, 11, seed=1)
    y = ((X[:, 0] + 0.3 * X[:, 1] ** 2 + numbers(157, seed=2)) > 0).astype("int64")

    def chosen(xp: Any, x: Any, y: Any) -> Any:
        x, x_test, y, y_test = model_selection.train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)
        found = {}
        for n in (2, 5):
            model = pipeline.make_pipeline(
                preprocessing.StandardScaler(),
                decomposition.PCA(n, svd_solver="full"),
                linear_model.LogisticRegression(solver="lbfgs"),
            )
            folds = model_selection.StratifiedKFold(4, shuffle=True, random_state=1)
            found[n] = model_selection.cross_validate(model, x, y, cv=folds, scoring=["accuracy", "neg_log_loss"])
            found[n] = [found[n][f"test_{name}"].tolist() for name in ("accuracy", "neg_log_loss")]
        model.fit(x, y)
        probabilities = model.predict_proba(x_test)[:, 1]
        labels = model.predict(x_test)
        return [
            [np.round(v, 5).tolist() for v in found[2]], [np.round(v, 5).tolist() for v in found[5]],
            abs(model[1].components_), model[1].explained_variance_ratio_, model[0].mean_,
            labels, probabilities, metrics.confusion_matrix(y_test, labels),
            metrics.accuracy_score(y_test, labels), metrics.log_loss(y_test, model.predict_proba(x_test)),
            metrics.roc_auc_score(y_test, probabilities), metrics.brier_score_loss(y_test, probabilities),
        ]  # fmt: skip

    with sklearn.config_context(array_api_dispatch=True):
        compared(chosen, X, y, count=count, rtol=1e-4, atol=1e-5)


@on_meshes
def test_a_signal_is_filtered_and_its_spectrum_drawn(count: int) -> None:
    t = np.arange(4001) / 1000.0
    noisy = np.sin(2 * np.pi * 50 * t) + 0.5 * np.sin(2 * np.pi * 120 * t * (1 + t / 10)) + 0.3 * numbers(4001)

    def spectrum(xp: Any, x: Any) -> Any:
        taps = signal.firwin(61, [30.0, 150.0], pass_zero=False, fs=1000.0)
        low = signal.oaconvolve(signal.detrend(x), xp.asarray(taps), mode="same")
        # SciPy returns spectra and what `sosfilt` makes as host arrays, and `sosfilt` writes to its argument.
        f, t, s = map(xp.asarray, signal.spectrogram(low, fs=1000.0, nperseg=256, noverlap=64))
        g, power = map(xp.asarray, signal.welch(low, fs=1000.0, nperseg=512))
        steep = xp.asarray(signal.sosfilt(signal.butter(4, 100.0, fs=1000.0, output="sos"), np.array(low)))
        envelope = xp.abs(signal.hilbert(low))
        two = signal.resample_poly(xp.stack([low, envelope]), 2, 5, axis=1)
        loud = xp.asarray([f[xp.argmax(s, axis=0)], xp.max(s, axis=0)])
        return [
            low,
            f,
            t,
            s,
            g,
            power,
            steep,
            envelope,
            two,
            loud,
            signal.correlate(low[:500], low[:60]),
            signal.medfilt(x, 5),
        ]

    compared(spectrum, noisy, count=count, rtol=1e-6, atol=1e-9)


@on_meshes
def test_a_climatology_of_temperatures(count: int) -> None:
    days = 3 * 365
    temperature = 10 * np.sin(np.arange(days) * 2 * np.pi / 365)[:, None, None] + numbers(days, 5, 7)
    temperature[100:140, 2, 3] = np.nan

    def climatology(xp: Any, x: Any) -> Any:
        d = xr.DataArray(
            x, dims=("time", "lat", "lon"), name="t",
            coords={"time": pd.date_range("2001-01-01", periods=days), "lat": np.linspace(-60, 60, 5), "lon": np.arange(7) * 50.0},
        )  # fmt: skip
        monthly = d.groupby("time.month").mean()
        anomaly = d.groupby("time.month") - monthly
        smooth = anomaly.rolling(time=30, center=True, min_periods=10).mean()
        weights = xr.DataArray(np.cos(np.deg2rad(d.lat.values)), dims="lat")
        yearly = d.resample(time="YE").mean()
        seasons = d.groupby("time.season").std()
        found = [
            monthly, anomaly, smooth, d.weighted(weights).mean(("lat", "lon")), yearly, seasons,
            d.sel(lat=slice(-40, 40), time="2002").max("time"), (d > 5).sum("time"), d.quantile(0.9, "time"),
            d.diff("time").mean("time"), d.fillna(0.0), xr.corr(d[:, 0, 0], d[:, 1, 1]), d.coarsen(time=5).mean(), d.differentiate("lat"),
        ]  # fmt: skip
        return [r.data for r in found]

    compared(climatology, temperature, count=count, rtol=1e-7, atol=1e-9)


@on_meshes
def test_objects_in_an_image_are_measured(count: int) -> None:
    y, x = np.mgrid[:83, :101]
    image = sum(np.exp(-((y - a) ** 2 + (x - b) ** 2) / 30) for a, b in [(20, 20), (55, 30), (40, 80), (70, 70)])
    image = image + 0.05 * numbers(83, 101)

    def measured(xp: Any, image: Any) -> Any:
        smooth = ndimage.gaussian_filter(image, 1.5)
        flat = smooth - ndimage.uniform_filter(smooth, 31)
        edges = xp.hypot(ndimage.sobel(smooth, axis=0), ndimage.sobel(smooth, axis=1))
        mask = ndimage.binary_opening(flat > 0.3 * xp.max(flat), iterations=2)
        labels, n = ndimage.label(mask)
        index = xp.arange(1, n + 1)
        sizes = ndimage.sum_labels(mask.astype("int64"), labels, index)
        means = ndimage.mean(image, labels, index)
        centres = ndimage.center_of_mass(image, labels, index)
        distance = ndimage.distance_transform_edt(mask)
        turned = ndimage.rotate(smooth, 30.0, reshape=False, order=1)
        half = ndimage.zoom(smooth, 0.5, order=1)
        sharp = ndimage.convolve(image, xp.asarray([[0.0, -1.0, 0.0], [-1.0, 5.0, -1.0], [0.0, -1.0, 0.0]]))
        biggest = labels == index[xp.argmax(sizes)]
        cut = ndimage.median_filter(image, size=5)[10:40, 5:40]
        return [
            smooth, flat, edges, mask, labels, n, sizes, means, np.asarray(centres).tolist(), distance, turned, half,
            sharp, biggest, cut, ndimage.maximum_filter(image, 3), ndimage.histogram(image, 0, 1, 8),
        ]  # fmt: skip

    compared(measured, image, count=count, rtol=1e-7, atol=1e-9)


@on_meshes
def test_a_report_of_two_samples(count: int) -> None:
    a, b = numbers(211), 0.4 + 1.2 * numbers(173, seed=1)

    def report(xp: Any, a: Any, b: Any) -> Any:
        t = stats.ttest_ind(a, b, equal_var=False)
        low, high = t.confidence_interval(0.95)
        r = stats.pearsonr(a[:173], b)
        boot = stats.bootstrap((a,), xp.mean, n_resamples=200, method="percentile", rng=np.random.default_rng(3))
        ks = stats.ks_2samp(a, b)
        return [
            t.statistic, t.pvalue, t.df, low, high, r.statistic, r.pvalue, *r.confidence_interval(),
            boot.confidence_interval.low, boot.confidence_interval.high, boot.standard_error, boot.bootstrap_distribution,
            float(ks.statistic), float(ks.pvalue), float(stats.kstest(np.asarray(a), "norm").pvalue), *stats.describe(a)[1],
            stats.skew(a), stats.kurtosis(b), stats.zscore(a), stats.iqr(a), stats.trim_mean(a, 0.1),
            *stats.mannwhitneyu(a, b), *stats.normaltest(b), *stats.spearmanr(a[:173], b), stats.sem(a),
            *stats.levene(a, b), *stats.mood(a, b),
        ]  # fmt: skip

    compared(report, a, b, count=count, rtol=1e-7, atol=1e-9)
