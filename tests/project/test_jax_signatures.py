"""The names of JAX's pages on sharding, maps and several processes exist, or have a hint; and functions of these names take
JAX's arguments: positions, names and defaults, but for listed exceptions.
"""

from __future__ import annotations

import functools
import inspect
from inspect import Parameter
from typing import Any

import shardtensor as st
import shardtensor.sharding
from tests import peers

NAMES = {
    "jax": (
        "P ShapeDtypeStruct ShapeDtypeStruct.like ShapeDtypeStruct.update custom_jvp custom_vjp device_count "
        "device_get device_put devices disable_jit eval_shape grad hessian jacfwd jacrev jit jvp linearize "
        "local_device_count local_devices make_array_from_callback make_array_from_process_local_data "
        "make_array_from_single_device_arrays make_mesh pmap process_count process_index remat reshard set_mesh "
        "shard_map smap typeof value_and_grad vjp vmap"
    ),
    "jax.sharding": (
        "AbstractMesh Mesh NamedSharding.devices_indices_map NamedSharding.is_equivalent_to NamedSharding.shard_shape "
        "auto_axes explicit_axes get_mesh reshard set_mesh"
    ),
    "jax.lax": (
        "all_gather all_to_all associative_scan axis_index axis_size cond fori_loop map pcast pmax pmean pmin ppermute pshuffle "
        "psum psum_scatter pswapaxes ragged_all_to_all scan stop_gradient switch while_loop with_sharding_constraint"
    ),
    "jax.experimental.multihost_utils": (
        "assert_equal broadcast_one_to_all global_array_to_host_local_array host_local_array_to_global_array "
        "process_allgather sync_global_devices"
    ),
    "jax.distributed": "initialize is_initialized shutdown",
    "jax.random": "fold_in key split",
    "jax.tree": "flatten leaves map structure unflatten",
    "jax.tree_util": "register_pytree_node",
}
"""The functions, classes and methods that are compared, by the modules of JAX that have them."""

PLACES = {
    "jax": st, "jax.sharding": shardtensor.sharding, "jax.lax": st, "jax.experimental.multihost_utils": st.distributed,
    "jax.distributed": st.distributed, "jax.random": st.random, "jax.tree": st.tree, "jax.tree_util": st,
}  # fmt: skip
"""Where they are here."""

EXCEPTIONS = {
    "jax.ShapeDtypeStruct: weak_type": "dtypes follow NumPy's rules",
    "jax.ShapeDtypeStruct: manual_axis_type": "outside of maps no array varies over mesh axes",
    "jax.ShapeDtypeStruct: is_ref": "tensors are mutable",
    "jax.P: unreduced_kind": "unreduced values are partial sums",
    "jax.device_put: src": "a tensor has its sharding",
    "jax.eval_shape: fun": "the function is given by position, and all names are for its arguments",
    "jax.grad: reduce_axes": "it has no effect in JAX",
    "jax.value_and_grad: reduce_axes": "likewise",
    "jax.vjp: reduce_axes": "likewise",
    "jax.vjp: saveable_args": "st.remat decides what is saved",
    "jax.vjp: in_nzs": "which inputs are differentiated follows from their types",
    "jax.linearize: in_nzs": "likewise",
    "jax.remat: concrete": "JAX 0.12 has it no more",
    "jax.jit: keep_unused": "an option of XLA",
    "jax.jit: inline": "an option of XLA",
    "jax.jit: compiler_options": "an option of XLA",
    "jax.jit: device": "computations follow their operands",
    "jax.jit: backend": "likewise",
    "jax.local_devices: process_index": "the devices of another process are st.devices() with its process_index",
    "jax.local_devices: backend": "it is the first one here",
    "jax.local_devices: host_id": "JAX's former name of process_index",
    "jax.process_count: backend": "all backends have the same processes",
    "jax.process_index: backend": "likewise",
    "jax.make_mesh: axis_types": "mesh axes have no types",
    "jax.make_mesh: axis_shapes": "JAX 0.12 calls it axis_sizes, too",
    "jax.sharding.Mesh: axis_types": "mesh axes have no types",
    "jax.sharding.AbstractMesh: axis_types": "mesh axes have no types",
    "jax.sharding.AbstractMesh: abstract_device": "abstract devices have no kind",
    "jax.pmap: fun": "it is called fn, as in all maps",
    "jax.pmap: axis_name": "by position there are arguments: st.pmap(f, x) calls the mapped function",
    "jax.pmap: static_broadcasted_argnums": "it is called static_argnums, as in st.jit",
    "jax.pmap: backend": "computations follow their operands",
    "jax.pmap: axis_size": "it follows from the arguments",
    "jax.pmap: donate_argnums": "donate=True, which applies to lists of shards",
    "jax.smap: in_axes": "st.smap maps at once, and takes axes",
    "jax.vmap: sum_match": "gradients of examples are never added by vmap",
    "jax.reshard: xs": "arrays are given by position",
    "jax.reshard: out_shardings": "it is called sharding, as in with_sharding_constraint",
    "jax.sharding.reshard: xs": "likewise",
    "jax.sharding.reshard: out_shardings": "likewise",
    "jax.lax.with_sharding_constraint: shardings": "it is called sharding, as in reshard",
    "jax.sharding.NamedSharding.devices_indices_map: global_shape": "it is called shape",
    "jax.sharding.NamedSharding.shard_shape: global_shape": "it is called shape",
    "jax.lax.all_gather: to": "the result is an array, as the block is",
    "jax.lax.cond: operand": "operands are given by position, as JAX prefers",
    "jax.lax.switch: operand": "likewise",
    "jax.lax.map: batch_size": "st.vmap inside of the function computes several rows at once",
    "jax.distributed.initialize: local_device_ids": "CUDA_VISIBLE_DEVICES, st.set_num_devices",
    "jax.distributed.initialize: cluster_detection_method": "the environment of the launcher is looked at",
    "jax.distributed.initialize: initialization_timeout": "by name only",
    "jax.distributed.initialize: heartbeat_timeout_seconds": "timeout is that of all exchanges",
    "jax.distributed.initialize: shutdown_timeout_seconds": "likewise",
    "jax.distributed.initialize: coordinator_bind_address": "process 0 binds the port of the address",
    "jax.distributed.initialize: slice_index": "devices have no slices",
    "jax.distributed.initialize: partition_index": "likewise",
    **{
        f"jax.distributed.initialize: {name}": "connections are not encrypted"
        for name in (
            "mtls_cert_file",
            "mtls_key_file",
            "mtls_ca_file",
            "mtls_peer_uri_prefix",
            "verify_secure_credentials",
        )
    },
    "jax.random.key: impl": "keys have one implementation",
    "jax.random.key: dtype": "likewise",
    "jax.tree_util.register_pytree_node: flatten_with_keys_func": "leaves have no paths of keys",
}
"""The parameters of JAX that are not taken here, or in another way, and why."""

THEIRS = """
import importlib, inspect

def plain(default):
    if default is inspect.Parameter.empty:
        return "required"
    return ("plain", default) if default is None or isinstance(default, (bool, int, float, str, tuple)) else "a default"

found = {}
for module, names in given.items():
    for name in names.split():
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None:
            parameters = inspect.signature(value).parameters.values()
            public = [p for p in parameters if p.name != "self" and p.name[0] != "_"]
            found[module, name] = [(p.name, p.kind.name, plain(p.default)) for p in public]
"""


def ours(module: str, name: str) -> list[Parameter]:
    value = functools.reduce(getattr, name.split("."), PLACES[module])
    return [p for p in inspect.signature(value).parameters.values() if p.name != "self"]


def difference(parameters: list[Parameter], position: int, name: str, kind: str, default: Any) -> str:
    """Returns what of a parameter of JAX is not taken; empty if it is."""
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if kind.startswith("VAR"):
        return "" if any(p.kind.name == kind for p in parameters) else f"no {kind}"
    found = next((p for p in parameters if p.name == name), None)
    if kind == "POSITIONAL_ONLY":
        found = by_position[position] if position < len(by_position) else None
    if found is None:
        return "not taken"
    if kind == "POSITIONAL_OR_KEYWORD" and found not in by_position[position : position + 1]:
        return "not at the same position"
    if kind != "POSITIONAL_ONLY" and found.kind is Parameter.POSITIONAL_ONLY:
        return "not by name"
    if default != "required" and found.default is Parameter.empty:
        return "required"
    return f"default {found.default!r}" if default[0] == "plain" and found.default != default[1] else ""


def test_arguments_of_jax_are_taken() -> None:
    peers.require_jax()
    theirs = peers.run(THEIRS, NAMES)
    found, known = {}, set()
    for (module, name), parameters in theirs.items():
        for position, (parameter, kind, default) in enumerate(parameters):
            known.add(f"{module}.{name}: {parameter}")
            if text := difference(ours(module, name), position, parameter, kind, default):
                found[f"{module}.{name}: {parameter}"] = text
    assert len(theirs) > 60
    assert {key: text for key, text in found.items() if key not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() & known == found.keys(), "what is taken is no exception"


UNEXPLAINED = [
    "allow_f16_reductions",
    "api_util",
    "array_garbage_collection_guard",
    "ds",
    "dtypes",
    "enable_checks",
    "explain_cache_misses",
    "float0",
    "image",
    "jax2tf_associative_scan_reductions",
    "log_compiles",
    "make_user_context",
    "monitoring",
    "no_execution",
    "no_tracing",
    "ops",
    "print_environment_info",
    "softmax_custom_jvp",
    "typing",
    "version",
    "DebugEffect",
    "OrderedDebugEffect",
    "breakpoint",
    "callback",
    "print",
]
"""Names of JAX for compilers, tracers, checks and printing, which the pages do not use, or after ``jax.debug`` only."""

DEFINED = """
import importlib, inspect, jax
found = {}
for name in given:
    place = importlib.import_module(name)
    names = [n for n in dir(place) if n[0] != "_" and (inspect.ismodule(getattr(place, n)) is False or name == "jax")]
    if name.endswith("multihost_utils"):  # It has no list of its public names, which have docstrings.
        names = [n for n in names if getattr(getattr(place, n), "__module__", "") == name and getattr(place, n).__doc__]
    found[name] = names
mesh = jax.make_mesh((1,), ("x",))
objects = mesh, mesh.abstract_mesh, jax.NamedSharding(mesh, jax.P("x")), jax.ShapeDtypeStruct((1,), "float32")
found.update({type(x).__name__: [n for n in dir(x) if n[0] != "_"] for x in objects})
"""


def test_names_of_jax_exist_or_have_a_hint() -> None:
    peers.require_jax()
    mesh = st.make_mesh((1,), ("x",))
    places = {
        "jax": st, "jax.sharding": shardtensor.sharding, "jax.experimental.multihost_utils": st.distributed,
        "jax.distributed": st.distributed, "jax.debug": st, "Mesh": mesh, "AbstractMesh": st.AbstractMesh((1,), ("x",)),
        "NamedSharding": st.NamedSharding(mesh, st.P("x")), "ShapeDtypeStruct": st.ShapeDtypeStruct((1,), "float32"),
    }  # fmt: skip
    theirs = peers.run(DEFINED, [name for name in places if name.startswith("jax")])
    assert theirs.keys() == places.keys()
    lacking = []
    for place, names in theirs.items():
        for name in names:
            try:
                getattr(places[place], name)
            except AttributeError as error:
                if ": " not in str(error):
                    lacking.append(f"{place}.{name}")
    assert [name for name in lacking if name.rpartition(".")[2] not in UNEXPLAINED] == []
    assert sum(map(len, theirs.values())) > 200


def test_specs_are_no_tuples() -> None:
    assert st.P("x", None) != ("x", None)
    assert st.P("x") != ("x",)
    assert not isinstance(st.P("x"), tuple)
