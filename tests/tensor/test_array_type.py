"""`st.typeof`: its notation is JAX's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st

SPECS = {
    "float32[8,4]": st.P(),
    "float32[8@X,4@Y]": st.P("X", "Y"),
    "float32[8,4@X]": st.P(None, "X"),
    "float32[8@(Y,X),4]": st.P(("Y", "X")),
}


@pytest.mark.parametrize("text", SPECS)
def test_types_of_tensors(text: str, backend: str) -> None:
    mesh = st.make_mesh((2, 2), ("X", "Y"), devices=st.devices(backend))
    x = st.zeros((8, 4), dtype="float32", device=st.NamedSharding(mesh, SPECS[text]))
    found = st.typeof(x)
    assert str(found) == repr(found) == text
    assert (found.shape, found.ndim, found.dtype, found.sharding) == ((8, 4), 2, np.dtype("float32"), x.sharding)
    assert found == st.typeof(x + 1) == st.typeof(st.ShapeDtypeStruct(x.shape, x.dtype, x.sharding))
    assert hash(found) == hash(st.typeof(x))
    assert found != st.typeof(x.astype("float64"))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((2, 3), "int8"), "int8[2,3]"),
        (np.float32(1), "float32[]"),
        (True, "bool[]"),
        (3, "int64[]"),
        (1.0, "float64[]"),
        (np.zeros(2, "M8[s]"), "datetime64[s][2]"),
    ],
)
def test_types_of_other_arrays(x: Any, text: str) -> None:
    found = st.typeof(x)
    assert str(found) == text
    assert found.sharding is None


def test_offloaded_tensors_are_marked() -> None:
    x = st.zeros(4)
    assert str(st.typeof(st.device_put(x, x.sharding.with_memory_kind("pinned_host")))) == "float64<host>[4@d]"


def test_types_inside_of_maps_and_of_inference(backend: str) -> None:
    mesh = st.make_mesh((2,), ("X",), devices=st.devices(backend))
    seen = []

    def f(x: Any) -> Any:
        seen.append(str(st.typeof(x)))
        return x

    g = st.shard_map(f, mesh=mesh, in_specs=st.P("X"), out_specs=st.P("X"))
    g(np.ones((4, 3)))
    st.eval_shape(g, np.ones((4, 3)))
    assert seen == ["float64[2,3]{V:X}"] * 4


@pytest.mark.parametrize("x", [None, "text", [1, 2], object()])
def test_what_has_no_type(x: Any) -> None:
    with pytest.raises(st.ArgumentTypeError, match=r"typeof: x is an? \w+; wanted a tensor, an array or a scalar"):
        st.typeof(x)
