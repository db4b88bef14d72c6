"""``shardtensor demo``: trains a network on handwritten digits on many devices and compares each result with NumPy.

The demo is written as user code: it uses only the public names of the library.
"""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

import shardtensor as st
from shardtensor.host.units import counted

__all__ = ["DemoResult", "gradients", "load_digits", "main"]

DEVICES = "SHARDTENSOR_NUM_DEVICES"
DEFAULT_DEVICES = 8
DEFAULT_STEPS = 150

PIXELS, HIDDEN, CLASSES = 64, 64, 10
HELD_OUT = 350  # The other 1447 rows are for training: a prime, so that no number of devices divides it.
RATE, MOMENTUM = 0.2, 0.9
SEED = 0

Array: TypeAlias = Any
"""A host array, a shard or a tensor: the functions below accept all of them."""
Weights: TypeAlias = tuple[Array, ...]
"""The weight matrix and bias of the hidden layer, then those of the output layer."""


@dataclass(frozen=True)
class DemoResult:
    """The outcome of the demo.

    Attributes:
        accuracy: the fraction of held-out digits that the trained network classifies correctly.
        checks: for the name of each result, whether it agrees with plain NumPy.
    """

    accuracy: float
    checks: Mapping[str, bool]

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [name for name, passed in self.checks.items() if not passed]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return not self.failed

    def __str__(self) -> str:
        accuracy = f"{self.accuracy:.1%} of {HELD_OUT} held-out digits are classified correctly"
        if self.passed:
            return f"PASSED: all {len(self.checks)} checks agree with plain NumPy, and {accuracy}."
        return f"FAILED: {', '.join(self.failed)} (against plain NumPy); {accuracy}."


def main(
    *,
    devices: int | None = None,
    backend: str | None = None,
    steps: int = DEFAULT_STEPS,
    console: Console | None = None,
) -> DemoResult:
    """Runs the whole demo and prints its progress.

    Args:
        devices: the number of devices to use (default: all). If the backend is not loaded yet and
            ``SHARDTENSOR_NUM_DEVICES`` is not set, this also determines the number of logical devices (default: 8).
        backend: the name of the backend (default: the default backend).
        steps: the number of training steps.
        console: the console to print to (default: standard output).

    Returns:
        The accuracy on held-out digits, and the checks.

    Raises:
        ArgumentError: no backend of that name is installed, it has fewer devices than requested, or a number
            is below 1.
        BackendError: the backend cannot be used on this machine; the message explains why.
    """
    for name, number in (("devices", devices), ("steps", steps)):
        if number is not None and number < 1:
            raise st.ArgumentError(f"demo: {name} is {number}; wanted at least 1")
    console = console or Console()
    with st.use_mesh(_mesh(devices, backend)) as mesh:
        return _run(mesh, steps, console)


def _run(mesh: st.Mesh, steps: int, console: Console) -> DemoResult:
    train, test = split_digits()
    checks: dict[str, bool] = {}
    checks |= show_devices(mesh, train, console)
    weights, results = show_training(train, steps, console)
    checks |= results
    accuracy, results = show_accuracy(test, weights, console)
    checks |= results
    checks |= show_principal_components(train, console)
    checks |= show_smap(train, console)
    checks |= show_transfers(train, weights, console)
    result = DemoResult(accuracy, checks)
    console.rule("Result")
    console.print(Text(str(result), style="bold green" if result.passed else "bold red"), soft_wrap=True)
    return result


# -- devices ---------------------------------------------------------------------------------------


def _mesh(count: int | None, backend: str | None) -> st.Mesh:
    """Returns a one-dimensional mesh of the first ``count`` devices of a backend (None: all)."""
    with _set_unless_given(DEVICES, str(count or DEFAULT_DEVICES)):
        devices = st.devices(backend)
    if count is not None and count > len(devices):
        raise st.ArgumentError(
            f"demo: {counted(count, 'device was', 'devices were')} requested, but backend {devices[0].backend!r} has "
            f"{len(devices)}; for more logical devices, set {DEVICES} before the first use"
        )
    return st.Mesh(devices[:count], "d")


@contextlib.contextmanager
def _set_unless_given(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside the ``with`` block, unless it is already set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


# -- data ------------------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Handwritten digits.

    Attributes:
        rows: the pixels, one row per image: shape (n, 64), values from 0 to 1.
        labels: the digits shown: shape (n,).
    """

    rows: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]

    def take(self, order: npt.NDArray[np.int64]) -> Digits:
        """Returns the digits at the indices ``order``."""
        return Digits(self.rows[order], self.labels[order])

    @property
    def targets(self) -> npt.NDArray[np.float64]:
        """The labels one-hot: the probabilities that the network should output, shape (n, 10)."""
        return np.eye(CLASSES)[self.labels]

    @property
    def images(self) -> npt.NDArray[np.float64]:
        """The pixels as images: shape (n, 8, 8)."""
        return self.rows.reshape(-1, 8, 8)


def load_digits() -> Digits:
    """Loads the 1797 digits of 8 × 8 pixels, with values from 0 to 1, that the package contains.

    ``digits/README.md`` gives their source.

    >>> from shardtensor.demo import load_digits
    >>> load_digits().images.shape
    (1797, 8, 8)
    """
    packed = resources.files("shardtensor").joinpath("digits/digits.csv.gz").read_bytes()
    table = np.loadtxt(gzip.decompress(packed).decode("ascii").splitlines(), dtype=np.int64, delimiter=",")
    return Digits(table[:, :PIXELS] / 16, table[:, PIXELS])


def split_digits() -> tuple[Digits, Digits]:
    """Returns the training digits and the held-out digits, shuffled so that both contain every writer."""
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.labels))
    examined, learned = order[:HELD_OUT], order[HELD_OUT:]
    return digits.take(learned), digits.take(examined)


def show_devices(mesh: st.Mesh, train: Digits, console: Console) -> dict[str, bool]:
    """Prints the mesh and the sharding of the rows, and checks that a tensor has the elements of its host array."""
    console.rule("Devices")
    console.print(f"{counted(mesh.size, 'device')} of kind {mesh.flat[0].kind}: {mesh!r}")
    rows = st.asarray(train.rows)
    sizes = [len(shard.data) for shard in rows.addressable_shards]
    console.print(f"training digits on each device: {sizes}")
    st.visualize_sharding(rows, file=console.file)
    return {"sharded rows": np.array_equal(np.asarray(rows), train.rows)}


# -- training --------------------------------------------------------------------------------------


def scores(xp: Any, rows: Array, weights: Weights) -> tuple[Array, Array]:
    """Returns the hidden activations of each row and the score (logit) of each class."""
    into_hidden, hidden_bias, into_classes, class_bias = weights
    hidden = xp.tanh(rows @ into_hidden + hidden_bias)
    return hidden, hidden @ into_classes + class_bias


def cross_entropy(rows: Array, targets: Array, weights: Weights) -> Array:
    """Returns the cross entropy of the network's scores, summed over the rows.

    Each device computes the sum of its rows, and the partial sums are combined.
    """
    _, score = scores(st, rows, weights)
    score = score - st.max(score, axis=1, keepdims=True)
    return -st.sum(targets * (score - st.log(st.sum(st.exp(score), axis=1, keepdims=True))))


def sharded_gradients(rows: Array, targets: Array, weights: Weights) -> tuple[Array, ...]:
    """Returns the loss of all rows, which are split over the devices, and its gradient with respect to each weight."""
    value, by_weights = st.value_and_grad(cross_entropy, argnums=2)(rows, targets, weights)
    return value, *by_weights


def gradients(rows: Array, targets: Array, weights: Weights) -> tuple[Array, ...]:
    """Computes what `sharded_gradients` computes, in plain NumPy: the derivatives are written by hand, as the check."""
    hidden, score = scores(np, rows, weights)
    score = score - score.max(axis=1, keepdims=True)
    log_chance = score - np.log(np.exp(score).sum(axis=1, keepdims=True))
    by_score = np.exp(log_chance) - targets
    by_hidden = (by_score @ weights[2].T) * (1 - hidden * hidden)
    value = -np.sum(targets * log_chance)
    return value, rows.T @ by_hidden, by_hidden.sum(axis=0), hidden.T @ by_score, by_score.sum(axis=0)


def initial_weights() -> Weights:
    """Returns the weights before training."""
    random = np.random.default_rng(SEED)
    return (
        random.normal(0, PIXELS**-0.5, (PIXELS, HIDDEN)),
        np.zeros(HIDDEN),
        random.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES)),
        np.zeros(CLASSES),
    )


def train(rows: Array, targets: Array, weights: Weights, steps: Iterable[int]) -> tuple[Weights, list[float]]:
    """Minimizes the mean loss by gradient descent with momentum; returns the weights and the losses."""
    optimizer = st.optim.sgd(RATE / len(rows), momentum=MOMENTUM)
    state, losses = optimizer.init(weights), []
    for _ in steps:
        loss, *sums = sharded_gradients(rows, targets, weights)
        updates, state = optimizer.update(tuple(sums), state)
        weights = st.optim.apply_updates(weights, updates)
        losses.append(float(loss) / len(rows))
    return weights, losses


def train_in_numpy(rows: Array, targets: Array, weights: Weights, steps: Iterable[int]) -> tuple[Weights, list[float]]:
    """Computes what `train` computes, in plain NumPy: gradients and steps are written by hand, as the check."""
    speeds: Sequence[Array] = [0.0] * len(weights)
    losses = []
    for _ in steps:
        loss, *sums = gradients(rows, targets, weights)
        speeds = [MOMENTUM * speed - RATE / len(rows) * total for speed, total in zip(speeds, sums, strict=True)]
        weights = tuple(weight + speed for weight, speed in zip(weights, speeds, strict=True))
        losses.append(float(loss) / len(rows))
    return weights, losses


def show_training(learned: Digits, steps: int, console: Console) -> tuple[Weights, dict[str, bool]]:
    """Trains the network on all devices and with plain NumPy, and compares the results.

    There is one bar without times for both: the network is too small for a comparison of speed.
    """
    console.rule("Training: value_and_grad and optim.sgd")
    rows, targets = st.asarray(learned.rows), st.asarray(learned.targets)
    mesh, start = rows.sharding.mesh, initial_weights()
    console.print(
        f"a network of {PIXELS}, {HIDDEN} and {CLASSES} units, on {counted(mesh.size, 'device')}, and again in plain "
        "NumPy, with handwritten gradients and steps, to check each loss and weight"
    )
    with Progress(TextColumn("training and check"), BarColumn(), TaskProgressColumn(), console=console) as progress:
        task = progress.add_task("training", total=2 * steps)

        def steps_shown() -> Iterator[int]:
            for step in range(steps):
                yield step
                progress.advance(task)

        replicated = st.device_put(start, st.NamedSharding(mesh, st.P()))
        weights, losses = train(rows, targets, replicated, steps_shown())
        plain_weights, plain_losses = train_in_numpy(learned.rows, learned.targets, start, steps_shown())
    console.print(f"the mean loss decreased from {losses[0]:.4f} to {losses[-1]:.4f} in {counted(steps, 'step')}")
    return weights, {
        "training losses": close(losses, plain_losses),
        "trained weights": all(map(close, weights, plain_weights)),
    }


def show_accuracy(test: Digits, weights: Weights, console: Console) -> tuple[float, dict[str, bool]]:
    """Classifies the held-out digits with functions of whole arrays: no lists and no maps, computation follows data."""
    _, score = scores(st, st.asarray(test.rows), weights)
    accuracy = float(st.mean(st.argmax(score, axis=1) == test.labels))
    console.print(f"accuracy on {HELD_OUT} held-out digits: {accuracy:.1%}")
    _, plain_score = scores(np, test.rows, tuple(map(np.asarray, weights)))
    return accuracy, {"held-out scores": close(score, plain_score)}


# -- other features --------------------------------------------------------------------------------


def principal_components(xp: Any, rows: Array, count: int) -> tuple[Array, npt.NDArray[np.float64]]:
    """Returns the projection of the rows on their first principal components, and their shares of the variance.

    The covariance is a matrix product that contracts the rows. If these are sharded, every device multiplies its own
    rows, and the 64 × 64 partial sums are combined. The eigenvectors are computed on the host.
    """
    centred = rows - xp.mean(rows, axis=0)
    covariance = np.asarray(centred.T @ centred) / (len(rows) - 1)
    variances, vectors = np.linalg.eigh(covariance)
    largest = vectors[:, ::-1][:, :count]
    signs = np.sign(largest[np.argmax(np.abs(largest), axis=0), np.arange(count)])  # eigh does not determine the signs.
    return centred @ (largest * signs), variances[::-1][:count] / variances.sum()


def show_principal_components(train: Digits, console: Console, count: int = 5) -> dict[str, bool]:
    """Projects the sharded rows on their principal components, and compares with plain NumPy."""
    console.rule("Principal components of the sharded array")
    projected, explained = principal_components(st, st.asarray(train.rows), count)
    plain, plain_explained = principal_components(np, train.rows, count)
    for number, share in enumerate(explained, 1):
        console.print(f"component {number} explains {share:6.1%} of the variance  {'█' * round(200 * share)}")
    console.print(f"the projected rows keep their sharding: {projected.sharding.spec}")
    return {
        "projected rows": close(projected, plain),
        "explained variance": close(explained, plain_explained),
    }


def show_smap(train: Digits, console: Console) -> dict[str, bool]:
    """Multiplies images, split by columns, by one factor per column with `smap`."""
    console.rule("smap with axes=[2, 0]")
    images, factors = train.images, np.linspace(0, 1, 8)
    faded = st.smap(lambda columns, factors: columns * factors, images, factors, axes=[2, 0])
    columns = [shard.data.shape[2] for shard in faded.addressable_shards]
    console.print(f"images {images.shape} faded to the left; columns on each device: {columns}")
    return {"smap": np.array_equal(np.asarray(faded), images * factors)}


def show_transfers(train: Digits, weights: Weights, console: Console) -> dict[str, bool]:
    """Prints the transfers of one training step, and checks that a map of a map transfers nothing."""
    console.rule("Transfers")
    rows, targets = st.asarray(train.rows), st.asarray(train.targets)
    console.print("one training step (bytes: transferred between separate memories; copied: in this memory):")
    with st.transfers() as log:
        sharded_gradients(rows, targets, weights)
    console.print(Text(str(log)))
    shards = st.shard(train.rows)
    with st.transfers() as log:
        same = st.pmap(st.sqrt, st.pmap(st.square, shards))
    console.print(f"pmap(st.sqrt, pmap(st.square, shards)) transferred {counted(log.bytes, 'byte')}")
    return {
        "pmap of pmap": close(st.concat(same), train.rows),
        "pmap of pmap transfers nothing": log.bytes == 0,
    }


def close(found: Any, wanted: Any) -> bool:
    """Whether two results are equal up to rounding errors of sums in a different order."""
    return np.allclose(np.asarray(found), np.asarray(wanted), rtol=1e-6, atol=1e-9)
