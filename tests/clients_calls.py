"""Calls of other libraries, of which `tests.clients_table` measures whether they take tensors.

Each call is a function of arrays that returns numbers to compare, with the arrays. Libraries are imported on use.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.clients.programs import Lazy, numbers


class Call(NamedTuple):
    """A call of a library.

    Attributes:
        function: takes arrays, and returns what is compared: arrays, numbers or bytes, in containers.
        arrays: the arrays, which are given as tensors.
    """

    function: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]


# -- arrays ----------------------------------------------------------------------------------------

X = numbers(53, 5)
Y = X @ numbers(5, seed=1) + 0.1 * numbers(53, seed=2)
CLASSES = (Y > 0).astype("int64") + (Y > 1)
BINARY = (Y > 0).astype("int64")
V, W, POSITIVE = numbers(37), numbers(37, seed=2), abs(numbers(37, seed=3)) + 0.1
UP = np.linspace(0, 3, 37)
TABLE, GRID = numbers(19, 7), numbers(12, 9, seed=4)
ROWS, COLUMNS = np.arange(9.0), np.arange(12.0)
PIXELS = (255 * abs(np.sin(numbers(23, 17, 3)))).astype("uint8")
WHOLE = numbers(37, dtype="int64")


# -- matplotlib ------------------------------------------------------------------------------------


def drawn(call: Callable[[Any, Any], Any], *, of_solids: bool = False) -> Callable[..., bytes]:
    """Returns the function that draws arrays by a call of a method of axes, and returns the picture."""

    def picture(*arrays: Any) -> bytes:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        canvas = FigureCanvasAgg(Figure((2, 2), 50))
        axes = canvas.figure.add_subplot(projection="3d" if of_solids else None)
        call(axes, *arrays)
        canvas.draw()
        return bytes(canvas.buffer_rgba())

    return picture


PLOTS: dict[str, tuple[Any, ...]] = {
    "acorr": (lambda ax, x: ax.acorr(x), V),
    "bar": (lambda ax, x, y: ax.bar(x, y, yerr=abs(y)), UP, POSITIVE),
    "barbs": (lambda ax, x, y: ax.barbs(x, y, 9 * x, 9 * y), V, W),
    "barh": (lambda ax, x, y: ax.barh(x, y), UP, POSITIVE),
    "boxplot": (lambda ax, x: ax.boxplot(x), TABLE),
    "contour": (lambda ax, x, y, z: ax.contour(x, y, z), ROWS, COLUMNS, GRID),
    "contourf": (lambda ax, z: ax.contourf(z), GRID),
    "ecdf": (lambda ax, x: ax.ecdf(x), V),
    "errorbar": (lambda ax, x, y: ax.errorbar(x, y, yerr=abs(y), xerr=0.1), V, W),
    "eventplot": (lambda ax, x: ax.eventplot(x), V),
    "fill": (lambda ax, x, y: ax.fill(x, y), V, W),
    "fill_between": (lambda ax, x, y: ax.fill_between(x, y, 0, where=y > 0), UP, W),
    "fill_betweenx": (lambda ax, x, y: ax.fill_betweenx(x, y), UP, W),
    "hexbin": (lambda ax, x, y: ax.hexbin(x, y, gridsize=5), V, W),
    "hist": (lambda ax, x: ax.hist(x, bins=5), V),
    "hist2d": (lambda ax, x, y: ax.hist2d(x, y, bins=5), V, W),
    "hlines": (lambda ax, x, y: ax.hlines(x, y, y + 1), V, W),
    "imshow": (lambda ax, x: ax.imshow(x), PIXELS),
    "loglog": (lambda ax, x, y: ax.loglog(x, y), POSITIVE, POSITIVE),
    "matshow": (lambda ax, x: ax.matshow(x), GRID),
    "pcolormesh": (lambda ax, x, y, z: ax.pcolormesh(x, y, z), ROWS, COLUMNS, GRID),
    "pie": (lambda ax, x: ax.pie(x), POSITIVE),
    "plot": (lambda ax, x, y: ax.plot(x, y, "o-"), V, W),
    "psd": (lambda ax, x: ax.psd(x, NFFT=16), V),
    "quiver": (lambda ax, x, y: ax.quiver(x, y, x, y), V, W),
    "scatter": (lambda ax, x, y: ax.scatter(x, y, c=y, s=20 * abs(x)), V, W),
    "semilogy": (lambda ax, x, y: ax.semilogy(x, y), UP, POSITIVE),
    "specgram": (lambda ax, x: ax.specgram(x, NFFT=16, noverlap=8), V),
    "spy": (lambda ax, x: ax.spy(x > 0), GRID),
    "stackplot": (lambda ax, x, y: ax.stackplot(x, y, 2 * y), UP, POSITIVE),
    "stairs": (lambda ax, x: ax.stairs(x), V),
    "stem": (lambda ax, x, y: ax.stem(x, y), UP, W),
    "step": (lambda ax, x, y: ax.step(x, y), UP, W),
    "streamplot": (lambda ax, x, y, z: ax.streamplot(x, y, z, z + 1), ROWS, COLUMNS, GRID),
    "tricontourf": (lambda ax, x, y, z: ax.tricontourf(x, y, z), V, W, POSITIVE),
    "tripcolor": (lambda ax, x, y, z: ax.tripcolor(x, y, z), V, W, POSITIVE),
    "violinplot": (lambda ax, x: ax.violinplot(x), TABLE),
    "vlines": (lambda ax, x, y: ax.vlines(x, 0, y), V, W),
    "xcorr": (lambda ax, x, y: ax.xcorr(x, y), V, W),
}

SOLIDS: dict[str, tuple[Any, ...]] = {
    "plot_surface": (lambda ax, x, y, z: ax.plot_surface(x[None], y[:, None], z), ROWS, COLUMNS, GRID),
    "plot_wireframe": (lambda ax, x, y, z: ax.plot_wireframe(x[None], y[:, None], z), ROWS, COLUMNS, GRID),
    "scatter (3D)": (lambda ax, x, y, z: ax.scatter(x, y, z), V, W, POSITIVE),
}

MATPLOTLIB = {name: Call(drawn(call), arrays) for name, (call, *arrays) in PLOTS.items()}
MATPLOTLIB |= {name: Call(drawn(call, of_solids=True), arrays) for name, (call, *arrays) in SOLIDS.items()}


# -- seaborn ---------------------------------------------------------------------------------------

sns = Lazy("seaborn")

SEABORN: dict[str, Call] = {
    name: Call(drawn(call), arrays)
    for name, (call, *arrays) in {
        "barplot": (lambda ax, x, y: sns.barplot(x=x, y=y, ax=ax, errorbar=None), CLASSES, Y),
        "boxplot": (lambda ax, x, y: sns.boxplot(x=x, y=y, ax=ax), CLASSES, Y),
        "ecdfplot": (lambda ax, x: sns.ecdfplot(x=x, ax=ax), V),
        "heatmap": (lambda ax, x: sns.heatmap(x, ax=ax), GRID),
        "histplot": (lambda ax, x: sns.histplot(x=x, ax=ax, bins=5), V),
        "kdeplot": (lambda ax, x, y: sns.kdeplot(x=x, y=y, ax=ax), V, W),
        "lineplot": (lambda ax, x, y: sns.lineplot(x=x, y=y, ax=ax), UP, W),
        "regplot": (lambda ax, x, y: sns.regplot(x=x, y=y, ax=ax, ci=None), V, W),
        "scatterplot": (lambda ax, x, y, c: sns.scatterplot(x=x, y=y, hue=c, ax=ax), V, W, WHOLE),
        "stripplot": (lambda ax, x, y: sns.stripplot(x=x, y=y, ax=ax, jitter=False), CLASSES, Y),
        "violinplot": (lambda ax, x: sns.violinplot(x=x, ax=ax), V),
    }.items()
}


# -- scikit-learn ----------------------------------------------------------------------------------


def fitted(path: str, methods: str, **options: Any) -> Callable[..., Any]:
    """Returns the function that fits an estimator to arrays, and returns what its methods return for the first one."""
    module, name = path.split(".")

    def results(x: Any, *labels: Any) -> Any:
        estimator = getattr(Lazy(f"sklearn.{module}"), name)(**options).fit(x, *labels)
        return [getattr(estimator, m) if m.endswith("_") else getattr(estimator, m)(x) for m in methods.split()]

    return results


SEED = {"random_state": 0}

ESTIMATORS: dict[str, tuple[str, dict[str, Any], tuple[np.ndarray, ...]]] = {
    "cluster.AgglomerativeClustering": ("labels_", {}, (X,)),
    "cluster.DBSCAN": ("labels_", {"eps": 2.0}, (X,)),
    "cluster.KMeans": ("labels_ cluster_centers_ predict", {"n_clusters": 3, "n_init": 2, **SEED}, (X,)),
    "cluster.MiniBatchKMeans": ("labels_ predict", {"n_clusters": 3, "n_init": 2, **SEED}, (X,)),
    "decomposition.FastICA": ("transform", {"n_components": 2, **SEED}, (X,)),
    "decomposition.NMF": ("transform", {"n_components": 2, "max_iter": 20, **SEED}, (abs(X),)),
    "decomposition.PCA": ("components_ transform", {"n_components": 3}, (X,)),
    "decomposition.TruncatedSVD": ("transform", {"n_components": 2, **SEED}, (X,)),
    "discriminant_analysis.LinearDiscriminantAnalysis": ("predict", {}, (X, CLASSES)),
    "ensemble.AdaBoostClassifier": ("predict", {"n_estimators": 3, **SEED}, (X, CLASSES)),
    "ensemble.ExtraTreesClassifier": ("predict", {"n_estimators": 3, **SEED}, (X, CLASSES)),
    "ensemble.GradientBoostingRegressor": ("predict", {"n_estimators": 3, **SEED}, (X, Y)),
    "ensemble.HistGradientBoostingClassifier": ("predict", {"max_iter": 3, **SEED}, (X, CLASSES)),
    "ensemble.IsolationForest": ("predict", {"n_estimators": 3, **SEED}, (X,)),
    "ensemble.RandomForestClassifier": ("predict predict_proba", {"n_estimators": 3, **SEED}, (X, CLASSES)),
    "ensemble.RandomForestRegressor": ("predict", {"n_estimators": 3, **SEED}, (X, Y)),
    "feature_selection.SelectKBest": ("transform", {"k": 2}, (X, CLASSES)),
    "gaussian_process.GaussianProcessRegressor": ("predict", {}, (X, Y)),
    "impute.SimpleImputer": ("transform", {}, (np.where(X > 1, np.nan, X),)),
    "linear_model.ElasticNet": ("coef_ predict", {}, (X, Y)),
    "linear_model.Lasso": ("coef_ predict", {"alpha": 0.1}, (X, Y)),
    "linear_model.LinearRegression": ("coef_ predict", {}, (X, Y)),
    "linear_model.LogisticRegression": ("predict predict_proba", {}, (X, CLASSES)),
    "linear_model.Ridge": ("coef_ predict", {}, (X, Y)),
    "linear_model.SGDClassifier": ("predict", {**SEED}, (X, CLASSES)),
    "manifold.TSNE": ("embedding_", {"max_iter": 250, "perplexity": 5, "init": "random", **SEED}, (X,)),
    "mixture.GaussianMixture": ("means_ predict", {"n_components": 2, "init_params": "random", **SEED}, (X,)),
    "naive_bayes.GaussianNB": ("predict predict_proba", {}, (X, CLASSES)),
    "neighbors.KNeighborsClassifier": ("predict", {}, (X, CLASSES)),
    "neighbors.KNeighborsRegressor": ("predict", {}, (X, Y)),
    "neural_network.MLPClassifier": ("predict", {"max_iter": 5, **SEED}, (X, CLASSES)),
    "preprocessing.KBinsDiscretizer": ("transform", {"encode": "ordinal", "quantile_method": "averaged_inverted_cdf"}, (X,)),
    "preprocessing.MinMaxScaler": ("transform", {}, (X,)),
    "preprocessing.OneHotEncoder": ("transform", {"sparse_output": False}, (CLASSES[:, None],)),
    "preprocessing.QuantileTransformer": ("transform", {"n_quantiles": 9}, (X,)),
    "preprocessing.RobustScaler": ("transform", {}, (X,)),
    "preprocessing.StandardScaler": ("mean_ transform", {}, (X,)),
    "svm.LinearSVC": ("predict", {**SEED}, (X, CLASSES)),
    "svm.SVC": ("predict", {}, (X, CLASSES)),
    "svm.SVR": ("predict", {}, (X, Y)),
    "tree.DecisionTreeClassifier": ("predict", {**SEED}, (X, CLASSES)),
    "tree.DecisionTreeRegressor": ("predict", {**SEED}, (X, Y)),
}  # fmt: skip


def dispatched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call with scikit-learn's dispatch to the array API."""

    def results(*arrays: Any) -> Any:
        with Lazy("sklearn").config_context(array_api_dispatch=True):
            return call(*arrays)

    return results


SKLEARN = {
    path.rpartition(".")[2]: Call(fitted(path, methods, **options), arrays)
    for path, (methods, options, arrays) in ESTIMATORS.items()
}
DISPATCHED = {name: Call(dispatched(call), arrays) for name, (call, arrays) in SKLEARN.items()}


# -- pandas, xarray, statsmodels, Pillow, NumPy, SciPy ----------------------------------------------

pd, xr, sm = Lazy("pandas"), Lazy("xarray"), Lazy("statsmodels.api")


def frame(x: Any) -> Any:
    return pd.DataFrame(x, columns=list("abcdefg"))


PANDAS = {
    "DataFrame": Call(lambda x: frame(x).describe().to_numpy(), (TABLE,)),
    "DataFrame of columns": Call(lambda x, y: pd.DataFrame({"x": x, "y": y}).corr().to_numpy(), (V, W)),
    "Index": Call(lambda x: pd.Index(x).to_numpy(), (WHOLE,)),
    "Series": Call(lambda x: pd.Series(x).rolling(3).mean().to_numpy(), (V,)),
    "Series of an index": Call(lambda x, i: pd.Series(x, index=i).sort_index().to_numpy(), (V, WHOLE)),
    "Series.isin": Call(lambda x: pd.Series(WHOLE).isin(x[:3]).to_numpy(), (WHOLE,)),
    "Series.to_numpy": Call(lambda x: (pd.Series(V) + x).to_numpy(), (W,)),
    "assignment": Call(lambda x: frame(TABLE).assign(h=x[:19]).to_numpy(), (V,)),
    "cut": Call(lambda x: pd.cut(x, 3).codes, (V,)),
    "column of sums": Call(lambda x: pd.DataFrame({"sum": [row.sum() for row in x]})["sum"].to_numpy(), (TABLE,)),
    "factorize": Call(lambda x: pd.factorize(x)[0], (WHOLE,)),
    "get_dummies": Call(lambda x: pd.get_dummies(x).to_numpy(), (WHOLE,)),
    "groupby": Call(lambda x, k: pd.Series(x).groupby(k).mean().to_numpy(), (V, WHOLE)),
    "isna": Call(lambda x: pd.isna(x), (V,)),
    "df.loc[mask]": Call(lambda m: frame(TABLE).loc[m > 0].to_numpy(), (V[:19],)),
    "df[mask]": Call(lambda m: frame(TABLE)[m > 0].to_numpy(), (V[:19],)),
    "qcut": Call(lambda x: pd.qcut(x, 3).codes, (V,)),
    "to_datetime": Call(lambda x: pd.to_datetime(x, unit="D").asi8, (WHOLE,)),
    "unique": Call(lambda x: pd.unique(x), (WHOLE,)),
}


def labelled(x: Any) -> Any:
    return xr.DataArray(x, dims=("t", "s"), coords={"t": np.arange(19)})


XARRAY = {
    name: Call(lambda x, method=method: [r.data for r in method(labelled(x))], (TABLE,))
    for name, method in {
        "arithmetic": lambda d: [d + 2 * d],
        "mean, std, var": lambda d: [d.mean(), d.std(), d.var("t"), d.std("t", ddof=1), d.std(skipna=False)],
        "groupby": lambda d: [d.groupby(d.t % 3).mean()],
        "interp": lambda d: [d.interp(t=[1.5, 2.5])],
        "isel and sel": lambda d: [d.isel(s=[1, 0]), d.sel(t=slice(2, 5))],
        "pointwise indexing": lambda d: [d.isel(t=xr.DataArray([0, 1], dims="p"), s=xr.DataArray([0, 1], dims="p"))],
        "polyfit": lambda d: [d.polyfit("t", 1).polyfit_coefficients],
        "quantile": lambda d: [d.quantile(0.3, "t")],
        "rolling": lambda d: [d.rolling(t=3).mean()],
        "where and fillna": lambda d: [d.where(d > 0).fillna(0)],
    }.items()
}

STATSMODELS = {
    "GLM": Call(lambda x, y: sm.GLM(y, x, family=sm.families.Poisson()).fit().params, (X, abs(Y).round())),
    "Logit": Call(lambda x, y: sm.Logit(y, x).fit(disp=0).params, (X, (numbers(53, seed=9) > 0).astype("int64"))),
    "OLS": Call(lambda x, y: [(r := sm.OLS(y, sm.add_constant(x)).fit()).params, r.pvalues, r.rsquared], (X, Y)),
    "RLM": Call(lambda x, y: sm.RLM(y, x).fit().params, (X, Y)),
    "WLS": Call(lambda x, y, w: sm.WLS(y, x, weights=w).fit().bse, (X, Y, abs(Y) + 1)),
    "nonparametric.KDEUnivariate": Call(lambda x: sm.nonparametric.KDEUnivariate(x).fit().density, (V,)),
    "nonparametric.lowess": Call(lambda x, y: sm.nonparametric.lowess(y, x), (V, W)),
    "tsa.ARIMA": Call(lambda x: sm.tsa.ARIMA(x, order=(1, 0, 0)).fit().params, (V,)),
    "tsa.acf": Call(lambda x: sm.tsa.acf(x, nlags=5), (V,)),
    "tsa.adfuller": Call(lambda x: sm.tsa.adfuller(x, maxlag=2, autolag=None)[0], (V,)),
    "tsa.seasonal_decompose": Call(lambda x: sm.tsa.seasonal_decompose(x, period=6).seasonal, (V,)),
}

image = Lazy("PIL.Image")


def saved(x: Any) -> bytes:
    file = io.BytesIO()
    image.fromarray(x).save(file, "png")
    return file.getvalue()


PILLOW = {
    "Image.fromarray": Call(lambda x: np.asarray(image.fromarray(x)), (PIXELS,)),
    "Image.putdata": Call(lambda x: np.asarray((p := image.new("L", (23, 17)), p.putdata(x))[0]), (PIXELS[:, :, 0].ravel(),)),
    "resize": Call(lambda x: np.asarray(image.fromarray(x).resize((9, 8))), (PIXELS,)),
    "save": Call(saved, (PIXELS,)),
}  # fmt: skip

drawn_by = np.random.default_rng
optimize, interpolate, spatial, sparse = [Lazy(f"scipy.{n}") for n in ("optimize", "interpolate", "spatial", "sparse")]
signal, linalg, ndimage, stats = [Lazy(f"scipy.{n}") for n in ("signal", "linalg", "ndimage", "stats")]

GENERATORS = {
    "choice": Call(lambda x: drawn_by(0).choice(x, 5), (V,)),
    "multivariate_normal": Call(lambda m, c: drawn_by(0).multivariate_normal(m, c), (X[0], X.T @ X)),
    "normal": Call(lambda x: drawn_by(0).normal(x), (V,)),
    "permutation": Call(lambda x, y: [drawn_by(0).permutation(x), drawn_by(0).permutation(y)], (V, TABLE)),
    "permuted": Call(lambda x: drawn_by(0).permuted(x, axis=0), (TABLE,)),
    "shuffle": Call(lambda x: (drawn_by(0).shuffle(x), x)[1], (TABLE,)),
}

SCIPY = {
    "interpolate.CubicSpline": Call(lambda x, y: interpolate.CubicSpline(x, y)(x[:5] + 0.01), (UP, W)),
    "interpolate.interp1d": Call(lambda x, y: interpolate.interp1d(x, y)(x[:5] + 0.01), (UP, W)),
    "linalg.eigh": Call(lambda x: linalg.eigh(x.T @ x)[0], (TABLE,)),
    "linalg.solve": Call(lambda x, y: linalg.solve(x.T @ x, y), (X, X[0])),
    "ndimage.gaussian_filter": Call(lambda x: ndimage.gaussian_filter(x, 1.2), (TABLE,)),
    "optimize.curve_fit": Call(lambda x, y: optimize.curve_fit(lambda t, a, b: a * t + b, x, y)[0], (UP, W)),
    "optimize.least_squares": Call(lambda x, y: optimize.least_squares(lambda p: x @ p - y, np.zeros(5)).x, (X, Y)),
    "optimize.linear_sum_assignment": Call(lambda x: optimize.linear_sum_assignment(x), (GRID,)),
    "optimize.minimize": Call(lambda x: optimize.minimize(lambda p: float(((x - p) ** 2).sum()), 0.0).x, (V,)),
    "signal.find_peaks": Call(lambda x: signal.find_peaks(x)[0], (V,)),
    "signal.sosfilt": Call(lambda s, x: signal.sosfilt(s, x), (np.array([[0.2, 0.3, 0.2, 1.0, -0.4, 0.1]]), V)),
    "signal.spectrogram": Call(lambda x: signal.spectrogram(x, nperseg=16)[2], (V,)),
    "signal.welch": Call(lambda x: signal.welch(x, nperseg=16)[1], (V,)),
    "sparse.csr_array": Call(lambda x: sparse.csr_array(x) @ np.ones(7), (TABLE,)),
    "spatial.ConvexHull": Call(lambda x: spatial.ConvexHull(x).vertices, (X[:, :2],)),
    "spatial.KDTree": Call(lambda x: spatial.KDTree(x).query(x, 2)[0], (X,)),
    "spatial.distance.cdist": Call(lambda x, y: Lazy("scipy.spatial.distance").cdist(x, y), (X, X[:7])),
    "stats.gaussian_kde": Call(lambda x: stats.gaussian_kde(x)(x[:5]), (V,)),
    "stats.linregress": Call(lambda x, y: stats.linregress(x, y).slope, (V, W)),
    "stats.norm.pdf": Call(lambda x: stats.norm.pdf(x), (V,)),
    "stats.ttest_ind": Call(lambda x, y: stats.ttest_ind(x, y).pvalue, (V, W)),
}

LIBRARIES: dict[str, tuple[str, dict[str, Call]]] = {
    # title, with the version: the module that has to be installed, and the calls
    "matplotlib {}": ("matplotlib", MATPLOTLIB),
    "seaborn {}": ("seaborn", SEABORN),
    "scikit-learn {}": ("sklearn", SKLEARN),
    "scikit-learn {} with `array_api_dispatch=True`": ("sklearn", DISPATCHED),
    "pandas {}": ("pandas", PANDAS),
    "xarray {}": ("xarray", XARRAY),
    "statsmodels {}": ("statsmodels", STATSMODELS),
    "Pillow {}": ("PIL", PILLOW),
    "`numpy.random.Generator` of NumPy {}": ("numpy", GENERATORS),
    "SciPy {} with `SCIPY_ARRAY_API=1`": ("scipy", SCIPY),
}
