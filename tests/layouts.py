"""What the tests draw, and how they compare with NumPy: the kit's (see `shardtensor.testing`)."""

from __future__ import annotations

from shardtensor.testing.layouts import (
    DTYPES,
    FLOATS,
    MESHES,
    NAMES,
    SIZES,
    all_specs,
    array,
    assert_same,
    broadcastable,
    mesh_of,
    meshes,
    on_host,
    placed,
    shapes,
    specs,
)

__all__ = [
    "DTYPES",
    "FLOATS",
    "MESHES",
    "NAMES",
    "SIZES",
    "all_specs",
    "array",
    "assert_same",
    "broadcastable",
    "mesh_of",
    "meshes",
    "on_host",
    "placed",
    "shapes",
    "specs",
]
