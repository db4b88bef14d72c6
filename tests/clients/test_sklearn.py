"""Programs of scikit-learn with `array_api_dispatch=True`: fitted attributes and predictions are tensors, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.clients.programs import compared, lazily, numbers

NAMES = ("decomposition", "discriminant_analysis", "linear_model", "metrics", "mixture", "model_selection", "pipeline")
sklearn, preprocessing = lazily("sklearn", title="scikit-learn"), lazily("sklearn", "preprocessing")[0]
decomposition, discriminant_analysis, linear_model, metrics, mixture, model_selection, pipeline = lazily(
    "sklearn", *NAMES
)

# scikit-learn divides by zero on purpose, and ignores the warning for NumPy's arrays only.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")

X = numbers(53, 5)
Y = X @ numbers(5, seed=1) + 0.1 * numbers(53, seed=2)
CLASSES = (Y > 0).astype("int64") + (Y > 1)
WEIGHTS = abs(numbers(53, seed=3))

Estimator = Callable[[], Any]
Fitted = tuple[Estimator, str, str]

REGRESSION: dict[str, Fitted] = {
    "Ridge": (lambda: linear_model.Ridge(solver="svd"), "coef_ intercept_", "predict"),
    "pipeline": (
        lambda: pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.Ridge(solver="svd")),
        "",
        "predict",
    ),
}

CLASSIFICATION: dict[str, Fitted] = {
    "LDA": (
        lambda: discriminant_analysis.LinearDiscriminantAnalysis(solver="svd"),
        "coef_ means_ priors_",
        "predict transform predict_proba",
    ),
    "RidgeClassifier": (lambda: linear_model.RidgeClassifier(solver="svd"), "coef_", "predict decision_function"),
    "LogisticRegression": (
        lambda: linear_model.LogisticRegression(solver="lbfgs"),
        "coef_ intercept_",
        "predict predict_proba",
    ),
}

UNSUPERVISED: dict[str, Fitted] = {
    **{
        f"PCA {solver}": (
            lambda solver=solver: decomposition.PCA(3, svd_solver=solver, random_state=0, power_iteration_normalizer="QR"),
            "components_ explained_variance_ mean_", "transform score_samples",
        )
        for solver in ("full", "covariance_eigh", "randomized", "auto")
    },
    "PCA whitened": (lambda: decomposition.PCA(2, svd_solver="full", whiten=True), "singular_values_", "fit_transform"),
    "GaussianMixture": (
        lambda: mixture.GaussianMixture(2, random_state=0, init_params="random", max_iter=300),
        "means_ covariances_", "predict predict_proba score_samples",
    ),
    **{
        name: (lambda name=name: getattr(preprocessing, name)(), "", "transform inverse_transform")
        for name in ("StandardScaler", "MinMaxScaler", "MaxAbsScaler")
    },
    "Normalizer": (lambda: preprocessing.Normalizer(), "", "transform"),
    "Binarizer": (lambda: preprocessing.Binarizer(), "", "transform"),
    "PolynomialFeatures": (lambda: preprocessing.PolynomialFeatures(), "", "transform"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def dispatching() -> Iterator[None]:
    with sklearn.config_context(array_api_dispatch=True):
        yield


def run(fitted: Fitted, x: Any, *labels: Any) -> list[Any]:
    """The fitted attributes of an estimator, and what its methods return."""
    make, attributes, methods = fitted
    estimator = make().fit(x, *labels)
    found = [getattr(estimator, name) for name in attributes.split()]
    for method in methods.split():
        found.append(getattr(estimator, method)(x))
    return found


on_meshes = pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.full)])


@on_meshes
@pytest.mark.parametrize("name", REGRESSION)
def test_regression(name: str, count: int) -> None:
    compared(lambda xp, x, y: run(REGRESSION[name], x, y), X, Y, count=count, rtol=1e-6, atol=1e-8)


@on_meshes
@pytest.mark.parametrize("name", CLASSIFICATION)
def test_classification(name: str, count: int) -> None:
    fitted = CLASSIFICATION[name]
    compared(lambda xp, x, y: run(fitted, x, y), X, CLASSES, count=count, rtol=1e-4, atol=1e-6)


@on_meshes
@pytest.mark.parametrize("name", UNSUPERVISED)
def test_unsupervised(name: str, count: int) -> None:
    compared(lambda xp, x: run(UNSUPERVISED[name], x), X, count=count, rtol=1e-6, atol=1e-7)


METRICS: dict[str, tuple[Any, ...]] = {
    **{
        name: (lambda *xs, name=name: getattr(metrics, name)(*xs), Y, Y + 0.1 * numbers(53, seed=4))
        for name in ("mean_squared_error", "mean_absolute_error", "r2_score", "explained_variance_score", "max_error")
    },
    **{
        name: (lambda *xs, name=name: getattr(metrics, name)(*xs), CLASSES > 0, Y > 0.2)
        for name in ("accuracy_score", "f1_score", "precision_score", "recall_score", "zero_one_loss", "jaccard_score")
    },
    "log_loss": (lambda *xs: metrics.log_loss(*xs), (CLASSES > 0).astype("int64"), 1 / (1 + np.exp(-Y))),
    "confusion_matrix": (lambda y, z: metrics.confusion_matrix(y, z).tolist(), CLASSES, CLASSES[::-1].copy()),
    "euclidean_distances": (lambda *xs: metrics.pairwise.euclidean_distances(*xs), X, X[:7]),
    "cosine_similarity": (lambda *xs: metrics.pairwise.cosine_similarity(*xs), X, X[:7]),
    "rbf_kernel": (lambda *xs: metrics.pairwise.rbf_kernel(*xs), X, X[:7]),
    "polynomial_kernel": (lambda *xs: metrics.pairwise.polynomial_kernel(*xs), X, X[:7]),
}  # fmt: skip


@on_meshes
@pytest.mark.parametrize("name", METRICS)
def test_metrics(name: str, count: int) -> None:
    metric, *arrays = METRICS[name]
    compared(lambda xp, *xs: metric(*xs), *arrays, count=count, rtol=1e-7)


def test_weighted_metrics() -> None:
    compared(
        lambda xp, y, z, w: [metrics.mean_squared_error(y, z, sample_weight=w), metrics.r2_score(y, z, sample_weight=w)],
        Y, Y + 1, WEIGHTS, count=3,
    )  # fmt: skip


def test_cross_validation_of_a_pipeline() -> None:
    def validated(xp: Any, x: Any, y: Any) -> Any:
        made = pipeline.make_pipeline(
            preprocessing.StandardScaler(), decomposition.PCA(3, svd_solver="full"), linear_model.Ridge(solver="svd")
        )
        scores = model_selection.cross_val_score(made, x, y, cv=3)
        predictions = model_selection.cross_val_predict(made, x, y, cv=3)
        return [scores.tolist(), predictions]

    compared(validated, X, Y, count=3, rtol=1e-6)


def test_splits_keep_tensors() -> None:
    def split(xp: Any, x: Any, y: Any) -> Any:
        return model_selection.train_test_split(x, y, random_state=0)

    compared(split, X, Y, count=3)
