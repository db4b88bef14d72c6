"""Transformations of some parameters: those of a mask, and several, each for the parameters with its label."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.optim.parameter_trees import expect_state
from shardtensor.optim.transformations import GradientTransformation, expect_transformation
from shardtensor.tensor import pytree


class MaskedNode(NamedTuple):
    """The place of a parameter that a mask leaves out: a tree without leaves."""


class MaskedState(NamedTuple):
    """The state of `masked`.

    Attributes:
        inner_state: that of the transformation, with `MaskedNode` in place of the parameters that it leaves out.
    """

    inner_state: Any


class MultiTransformState(NamedTuple):
    """The state of `multi_transform`.

    Attributes:
        inner_states: for each label, the state of its transformation, as `masked` has it.
    """

    inner_states: dict[Any, Any]


@hinted
def masked(inner: GradientTransformation, mask: Any) -> GradientTransformation:
    """Returns a transformation of some leaves; the updates of the others are their gradients.

    Args:
        inner: the transformation. It finds `MaskedNode`, which is no leaf, in place of the other leaves.
        mask: a tree of bools with the structure of the parameters, of which a leaf may stand for a whole subtree; or a
            function of the parameters, or of the gradients, that returns one.

    Raises:
        ArgumentError: ``init`` or ``update`` gets a tree of which the mask is no prefix.
        ArgumentTypeError: ``inner`` is no transformation, or the mask has leaves that are not bools.

    >>> optimizer = st.optim.masked(st.optim.sgd(0.5), {"w": True, "b": False})
    >>> params = {"w": st.ones(2), "b": st.ones(2)}
    >>> updates, state = optimizer.update(params, optimizer.init(params))
    >>> updates["w"].tolist(), updates["b"].tolist()
    ([-0.5, -0.5], [1.0, 1.0])
    """
    expect_transformation("optim.masked", "inner", inner)

    def kept(tree: Any, name: str) -> list[bool]:
        return _covering(mask(tree) if callable(mask) else mask, tree, name)

    def init(params: Any) -> MaskedState:
        return MaskedState(inner.init(_hidden(params, kept(params, "params"))))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MaskedState]:
        expect_state("optim.masked", state, MaskedState)
        keep = kept(updates, "gradients")
        others = None if params is None else _hidden(params, keep)
        new, after = inner.update(_hidden(updates, keep), state.inner_state, others)
        found = iter(pytree.leaves(new))
        both = [next(found) if k else old for k, old in zip(keep, pytree.leaves(updates), strict=True)]
        return pytree.replaced(updates, both), MaskedState(after)

    return GradientTransformation(init, update)


def _covering(mask: Any, tree: Any, name: str) -> list[bool]:
    spread = pytree.spread(mask, tree, "optim.masked: mask", name)
    # A mask that `tree.map` makes of parameters has None where they have.
    keep = [False if k is None and x is None else k for k, x in zip(spread, pytree.leaves(tree), strict=True)]
    for leaf in keep:
        if not isinstance(leaf, (bool, np.bool_)):
            raise ArgumentTypeError(f"optim.masked: mask has the leaf {leaf!r:.60}, {type_text(leaf)}; wanted bools")
    return keep


def _hidden(tree: Any, keep: list[bool]) -> Any:
    leaves = pytree.leaves(tree)
    if len(leaves) != len(keep):
        raise ArgumentError(
            f"optim.masked: params have {len(leaves)} leaves, and gradients have {len(keep)}; wanted trees of one "
            "structure"
        )
    return pytree.replaced(tree, [leaf if k else MaskedNode() for leaf, k in zip(leaves, keep, strict=True)])


@hinted
def multi_transform(transforms: Mapping[Hashable, GradientTransformation], param_labels: Any) -> GradientTransformation:
    """Returns a transformation that applies to each parameter the transformation of its label.

    Args:
        transforms: the transformations by their labels.
        param_labels: a tree of labels with the structure of the parameters, of which a leaf may stand for a whole
            subtree; or a function of the parameters, or of the gradients, that returns one.

    Raises:
        ArgumentError: ``init`` gets parameters with labels that have no transformation, or of another structure.
        ArgumentTypeError: ``transforms`` is no mapping to transformations.

    >>> optimizer = st.optim.multi_transform(
    ...     {"fast": st.optim.sgd(1.0), "frozen": st.optim.set_to_zero()}, {"w": "fast", "b": "frozen"}
    ... )
    >>> params = {"w": st.ones(2), "b": st.ones(2)}
    >>> updates, state = optimizer.update(params, optimizer.init(params))
    >>> updates["w"].tolist(), updates["b"].tolist()
    ([-1.0, -1.0], [0.0, 0.0])
    """
    caller = "optim.multi_transform"
    if not isinstance(transforms, Mapping):
        raise ArgumentTypeError(f"{caller}: transforms is {type_text(transforms)}; wanted a dict of transformations")
    for name, one in transforms.items():
        expect_transformation(caller, f"transforms[{name!r}]", one)

    def parts(tree: Any, name: str) -> dict[Any, GradientTransformation]:
        labels = pytree.spread(
            param_labels(tree) if callable(param_labels) else param_labels, tree, f"{caller}: param_labels", name
        )
        used = {label for label, leaf in zip(labels, pytree.leaves(tree), strict=True) if leaf is not None}
        if unknown := used - transforms.keys():
            raise ArgumentError(
                f"{caller}: param_labels has {', '.join(sorted(map(repr, unknown)))}; wanted labels of transforms: "
                f"{', '.join(map(repr, transforms))}"
            )
        return {
            label: masked(one, pytree.replaced(tree, [other == label for other in labels]))
            for label, one in transforms.items()
        }

    def init(params: Any) -> MultiTransformState:
        return MultiTransformState({label: one.init(params) for label, one in parts(params, "params").items()})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MultiTransformState]:
        expect_state(caller, state, MultiTransformState)
        if state.inner_states.keys() != transforms.keys():
            raise ArgumentError(
                f"{caller}: state is that of {', '.join(map(repr, state.inner_states))}; wanted "
                f"{', '.join(map(repr, transforms))}"
            )
        after = {}
        for label, one in parts(updates, "gradients").items():
            updates, after[label] = one.update(updates, state.inner_states[label], params)
        return updates, MultiTransformState(after)

    return GradientTransformation(init, update)
