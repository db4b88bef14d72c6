"""The protocol of optimizers, with optax's names: pairs of functions that chain, and the step of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.standard.creation import zeros_like
from shardtensor.host.units import counted
from shardtensor.optim.parameter_trees import floating, like, mapped


class GradientTransformation(NamedTuple):
    """A pair of functions that makes updates of gradients. Optimizers are such pairs, and so are their parts.

    Each pair of functions with these signatures chains with those of the library; they call `shardtensor.tree` and any
    operators, and may run under `shardtensor.jit`.

    Attributes:
        init: ``init(params)`` returns the state: a pytree of tensors.
        update: ``update(grads, state, params=None)`` returns the updates, a tree like the gradients, and the next
            state. Some transformations need the parameters.

    >>> halved = st.optim.GradientTransformation(
    ...     lambda params: (), lambda grads, state, params=None: (st.tree.map(lambda g: g / 2, grads), state)
    ... )
    >>> optimizer = st.optim.chain(halved, st.optim.sgd(0.1))
    >>> optimizer.update([st.ones(2)], optimizer.init([st.ones(2)]))[0][0].tolist()
    [-0.05, -0.05]
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class EmptyState(NamedTuple):
    """The state of a transformation that has none."""


@hinted
def stateless(update: Callable[[Any, Any], Any]) -> GradientTransformation:
    """Returns the transformation of a function of the gradients and the parameters, which may be None.

    Args:
        update: the function, which returns the updates.

    >>> halved = st.optim.stateless(lambda grads, params: st.tree.map(lambda g: g / 2, grads))
    >>> halved.update([st.ones(2)], halved.init([st.ones(2)]))[0][0].tolist()
    [0.5, 0.5]
    """
    return GradientTransformation(
        lambda params: EmptyState(), lambda updates, state, params=None: (update(updates, params), state)
    )


@hinted
def identity() -> GradientTransformation:
    """Returns a transformation whose updates are the gradients.

    >>> st.optim.identity().update([1.0], st.optim.identity().init([0.0]))
    ([1.0], EmptyState())
    """
    return stateless(lambda updates, params: updates)


@hinted
def set_to_zero() -> GradientTransformation:
    """Returns a transformation whose updates are zeros, for parameters that stay as they are; see `multi_transform`.

    >>> zero = st.optim.set_to_zero()
    >>> zero.update([st.ones(2)], zero.init([st.ones(2)]))[0][0].tolist()
    [0.0, 0.0]
    """
    return stateless(lambda updates, params: mapped("optim.set_to_zero", zeros_like, {"gradients": updates}))


def expect_transformation(caller: str, name: str, one: Any) -> None:
    """Raises an error if an object has no functions ``init`` and ``update``."""
    if not (callable(getattr(one, "init", None)) and callable(getattr(one, "update", None))):
        raise ArgumentTypeError(
            f"{caller}: {name} is {type_text(one)}; wanted a GradientTransformation, as optim.sgd(0.1) returns it"
        )


@hinted
def chain(*args: GradientTransformation) -> GradientTransformation:
    """Returns a transformation that applies several in order: each gets the updates of the one before it.

    Its state is a tuple of theirs.

    Args:
        args: the transformations.

    Raises:
        ArgumentTypeError: one of them has no ``init`` and ``update``. ``update`` raises it if the state is no tuple.
        ArgumentError: ``update`` gets a state of another number of transformations.

    >>> optimizer = st.optim.chain(st.optim.clip_by_global_norm(1.0), st.optim.sgd(0.5))
    >>> params = {"w": st.zeros(2)}
    >>> updates, state = optimizer.update({"w": st.asarray([3.0, 4.0])}, optimizer.init(params), params)
    >>> np.round(updates["w"], 3).tolist()
    [-0.3, -0.4]
    """
    for number, one in enumerate(args):
        expect_transformation("optim.chain", f"argument {number}", one)

    def init(params: Any) -> tuple[Any, ...]:
        return tuple([one.init(params) for one in args])

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(state, tuple):
            raise ArgumentTypeError(f"optim.chain: state is {type_text(state)}; wanted the tuple that init returns")
        if len(state) != len(args):
            raise ArgumentError(
                f"optim.chain: state is that of {counted(len(state), 'transformation')}; wanted that of {len(args)}, "
                "as init returns it"
            )
        states = []
        for one, before in zip(args, state, strict=True):
            updates, after = one.update(updates, before, params)
            states.append(after)
        return updates, tuple(states)

    return GradientTransformation(init, update)


@hinted
def apply_updates(params: Any, updates: Any) -> Any:
    """Returns the sum of parameters and updates, in the dtype and the sharding of each parameter.

    Args:
        params: a tree of floating-point tensors, host arrays and numbers; None is no leaf.
        updates: a tree of the same structure and shapes, in any floating-point dtype and layout.

    Returns:
        New tensors. An update in another layout than its parameter is transferred.

    Raises:
        ArgumentError: the trees have different structures.
        ShapeError: an update has another shape than its parameter.
        ArgumentTypeError: a parameter has no real floating-point numbers.

    >>> st.optim.apply_updates({"w": st.ones(2, dtype="float32")}, {"w": st.asarray([0.5, -0.5])})["w"].tolist()
    [1.5, 0.5]
    """
    trees = {"params": floating("optim.apply_updates", params), "updates": updates}
    return mapped("optim.apply_updates", lambda p, u: like(p + u, p), trees)
