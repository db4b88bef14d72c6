"""Errors that people make name the function, both trees and the first path that differs; and masks and chains."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError

o = st.optim


def params() -> dict[str, Any]:
    return {"layers": [{"w": st.ones((3, 2)), "b": st.ones(2)}, {"w": st.ones((2, 2))}], "scale": st.ones(4)}


def without(path: str) -> dict[str, Any]:
    tree = params()
    if path == "b":
        del tree["layers"][0]["b"]
    if path == "more":
        tree["bias"] = st.ones(1)
    if path == "none":
        tree["scale"] = None
    if path == "leaf":
        tree["layers"][1] = st.ones(2)
    if path == "shape":
        tree["layers"][0]["w"] = st.ones((2, 3))
    if path == "ordered":
        tree["layers"][1] = OrderedDict(tree["layers"][1])
    return tree


OTHER_TREES = {
    "b": r"gradients\['layers'\]\[0\]\['b'\] exists, and state.mu\['layers'\]\[0\]\['b'\] does not",
    "more": r"state.mu\['bias'\] exists, and gradients\['bias'\] does not",
    "none": r"gradients\['scale'\] is float64\[4.*\], and state.mu\['scale'\] is None",
    "leaf": r"gradients\['layers'\]\[1\] is a dict, and state.mu\['layers'\]\[1\] is float64\[2",
    "shape": r"gradients\['layers'\]\[0\]\['w'\] has the shape \(3, 2\), and state.mu\['layers'\]\[0\]\['w'\] has \(2, 3\)",
    "ordered": r"gradients\['layers'\]\[1\] is a dict, and state.mu\['layers'\]\[1\] is an OrderedDict",
}


@pytest.mark.parametrize("path", OTHER_TREES)
@pytest.mark.parametrize("jit", [False, True])
def test_a_state_of_another_tree(path: str, jit: bool) -> None:
    optimizer = o.adamw(0.1)
    state, kind = optimizer.init(without(path)), ShapeError if path == "shape" else ArgumentError
    update = st.jit(optimizer.update) if jit else optimizer.update
    with pytest.raises(kind, match=f"optim.scale_by_adam: {OTHER_TREES[path]}"):
        update(params(), state, params())


def test_containers_that_differ_in_no_entry() -> None:
    one, other = [{"x": defaultdict(kind, w=st.ones(2))} for kind in (int, list)]
    with pytest.raises(
        ArgumentError, match=r"updates: params is PyTreeSpec\(.*int.*, and updates is PyTreeSpec\(.*list"
    ):
        o.apply_updates(one, other)


@pytest.mark.parametrize("path", OTHER_TREES)
def test_gradients_of_another_tree(path: str) -> None:
    kind = ShapeError if path == "shape" else ArgumentError
    decay = o.add_decayed_weights(0.1)
    with pytest.raises(kind, match=r"optim\.add_decayed_weights: .*(gradients.* and params|params.* and gradients)"):
        decay.update(without(path), decay.init(params()), params())
    with pytest.raises(kind, match=r"optim\.apply_updates: .*(updates.* and params|params.* and updates)"):
        o.apply_updates(params(), without(path))


@pytest.mark.parametrize("optimizer", [o.adamw(0.1), o.lion(0.1), o.adafactor(0.1), o.muon(0.1, weight_decay=0.1)])
def test_updates_that_need_the_parameters(optimizer: Any) -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"params is None; wanted the parameters: update\(grads, state, params\)"
    ):
        optimizer.update(params(), optimizer.init(params()))
    o.adam(0.1).update(params(), o.adam(0.1).init(params()))


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex128"])
def test_parameters_that_are_no_real_numbers(dtype: str) -> None:
    wrong = {"w": st.ones(2), "ids": [st.ones(3, dtype=dtype)]}
    for optimizer in (o.adam(0.1), o.sgd(0.1, 0.9), o.lion(0.1), o.adafactor(0.1)):
        with pytest.raises(
            ArgumentTypeError, match=rf"optim.*: params\['ids'\]\[0\] has the dtype {dtype}; wanted real"
        ):
            optimizer.init(wrong)
    with pytest.raises(ArgumentTypeError, match=r"optim.apply_updates: params\['ids'\]\[0\]"):
        o.apply_updates(wrong, wrong)


def test_states_of_other_transformations() -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"optim.scale_by_adam: state is an EmptyState; wanted the ScaleByAdamState"
    ):
        o.adam(0.1).update(params(), o.sgd(0.1).init(params()))
    with pytest.raises(ArgumentError, match="state is that of 2 transformations; wanted that of 3"):
        o.adamw(0.1).update(params(), o.adam(0.1).init(params()), params())
    with pytest.raises(ArgumentTypeError, match=r"optim.chain: state is a dict; wanted the tuple"):
        o.adam(0.1).update(params(), {}, params())
    with pytest.raises(ArgumentTypeError, match=r"optim.masked: state is a tuple; wanted the MaskedState"):
        o.masked(o.adam(0.1), True).update(params(), o.adam(0.1).init(params()))
    rms, matrix = o.scale_by_factored_rms(), {"w": st.ones((3, 2))}
    with pytest.raises(ShapeError, match=r"a moment of the state has the shape \(2,\); wanted \(3, 2\)"):
        rms.update(matrix, rms.init(matrix)._replace(v={"w": st.ones(2)}), matrix)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: o.chain(o.sgd), "optim.chain: argument 0 is a function; wanted a GradientTransformation"),
        (lambda: o.sgd("0.1"), "learning_rate is a str; wanted a number"),
        (lambda: o.sgd(np.ones(2)), r"learning_rate is float64\[2\]"),
        (lambda: o.adamw(params(), 1e-3), r"learning_rate is a dict; .* \(the parameters are the argument of init\)"),
        (lambda: o.masked(0.1, True), "optim.masked: inner is a float; wanted a GradientTransformation"),
        (lambda: o.multi_transform({"a": o.sgd}, "a"), r"transforms\['a'\] is a function; wanted a GradientTransformat"),
        (lambda: o.multi_transform([o.sgd(0.1)], "a"), "transforms is a list; wanted a dict of transformations"),
        (lambda: o.adamw(lr=0.1), "adamw: got an unexpected keyword argument 'lr'; it is called learning_rate here"),
        (lambda: o.linear_schedule(1.0, 0.0, 0), "transition_steps is 0; wanted at least 1"),
        (lambda: o.cosine_decay_schedule(1.0, 0), "decay_steps is 0; wanted at least 1"),
        (lambda: o.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10), "decay_steps - warmup_steps is 0"),
        (lambda: o.warmup_cosine_decay_schedule(0.0, 1.0, -1, 10), "warmup_steps is -1"),
        (lambda: o.piecewise_constant_schedule(1.0, {3: -1.0}), "the factor at step 3 is -1.0"),
        (lambda: o.exponential_decay(1.0, 10, 0.0), "decay_rate is 0.0; wanted a positive number"),
        (lambda: o.muon(0.1, ((1.0, 2.0, 3.0),), 2), "wanted three numbers, or three for each of 2 steps"),
        (lambda: o.muon(0.1, (1.0, 2.0)), "wanted three numbers"),
        (lambda: o.scale_by_muon().update({"w": st.ones(3)}, o.scale_by_muon().init({"w": st.ones(3)})), "wanted a matrix"),
        (lambda: o.masked(o.sgd(0.1), {"w": True}).init(params()), "optim.masked: mask has the entries"),
        (lambda: o.masked(o.sgd(0.1), {"layers": 1, "scale": True}).init(params()), "mask has the leaf 1, an int"),
        (lambda: o.multi_transform({"a": o.sgd(0.1)}, "b").init(params()), "param_labels has 'b'; wanted labels of"),
        (lambda: o.multi_transform({"a": o.sgd(0.1)}, ["a"]).init(params()), "optim.multi_transform: param_labels"),
    ],
)  # fmt: skip
def test_arguments(call: Any, words: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError, ShapeError), match=words):
        call()


def test_masks_leave_out_what_is_no_parameter() -> None:
    """The state of what a mask leaves out has no leaves, so that other arrays may be there."""
    tree = {"w": st.ones(3), "ids": st.ones(3, dtype="int32")}
    optimizer = o.masked(o.adam(0.1), {"w": True, "ids": False})
    state = optimizer.init(tree)
    assert isinstance(state.inner_state[0].mu["ids"], o.MaskedNode)
    assert len(st.tree.leaves(state)) == 3


def test_masks_and_labels_of_subtrees_and_in_each_other() -> None:
    inner = o.multi_transform({"a": o.adam(0.1), "b": o.sgd(1.0)}, {"layers": "a", "scale": "b"})
    optimizer = o.chain(o.masked(inner, {"layers": [True, False], "scale": True}), o.clip(10.0))
    state = optimizer.init(params())
    updates, after = st.jit(optimizer.update)(params(), state, params())
    assert updates["scale"].tolist() == [-1.0] * 4
    np.testing.assert_allclose(np.asarray(updates["layers"][0]["w"]), -0.1, rtol=1e-6)
    assert updates["layers"][1]["w"].tolist() == [[1.0, 1.0]] * 2
    assert st.tree.structure(state) == st.tree.structure(after)


def test_own_transformations_chain() -> None:
    def init(tree: Any) -> Any:
        return {"seen": st.tree.map(st.zeros_like, tree)}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return grads, {"seen": st.tree.map(lambda s, g: s + g, state["seen"], grads)}

    optimizer = o.chain(o.GradientTransformation(init, update), o.sgd(0.5))
    step = st.jit(optimizer.update)
    state = optimizer.init(params())
    for _ in range(2):
        _, state = step(params(), state)
    assert state[0]["seen"]["scale"].tolist() == [2.0] * 4


def test_a_checkpoint_restores_a_state(tmp_path: Any) -> None:
    optimizer = o.chain(
        o.clip_by_global_norm(1.0), o.adamw(o.constant_schedule(0.1), mask={"layers": True, "scale": False})
    )
    _, state = optimizer.update(params(), optimizer.init(params()), params())
    st.checkpoint.save(tmp_path / "state", state)
    restored = st.checkpoint.restore(tmp_path / "state", like=optimizer.init(params()))
    assert st.tree.structure(restored) == st.tree.structure(state)
    for x, y in zip(st.tree.leaves(state), st.tree.leaves(restored), strict=True):
        assert (x.tolist(), x.sharding) == (y.tolist(), y.sharding)


def test_a_mask_of_parameters_with_none() -> None:
    tree = {"w": st.ones((2, 2)), "b": st.ones(2), "none": None}
    optimizer = o.masked(o.sgd(0.5), lambda p: st.tree.map(lambda x: x.ndim > 1, p))
    updates, _ = optimizer.update(tree, optimizer.init(tree), tree)
    assert (updates["w"][0, 0], updates["b"][0], updates["none"]) == (-0.5, 1.0, None)
