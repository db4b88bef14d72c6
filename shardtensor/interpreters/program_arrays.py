"""The arrays of a program of a map as tensors, and back: its operators take both, derivatives and batches tensors."""

from __future__ import annotations

from typing import Any

from shardtensor.core import call, innermost
from shardtensor.interpreters.on_device import DeviceInterpreter
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, shard_arrays, tensor_of


def program_of(interpreter: Any) -> DeviceInterpreter | None:
    """Returns the interpreter of the device, given the innermost one in a program of a map."""
    return interpreter if isinstance(interpreter, DeviceInterpreter) else getattr(interpreter, "in_program", None)


def adopted(here: DeviceInterpreter, x: Any) -> Any:
    """Returns an array of a device as a tensor, which nothing writes in place; other objects as they are."""
    if type(x) is ShardedTensor or not here.backend.is_array(x):
        return x
    value = here.aval_of(x)
    return x if value is None else tensor_of(value, (here.backend.asarray(x),), (None,))


def exported(here: DeviceInterpreter, x: Any) -> Any:
    """Returns a tensor on a device as an array of it; other objects as they are."""
    if type(x) is not ShardedTensor or x.sharding.mesh.flat != (here.device,):
        return x
    x = call("copy", x) if hasattr(x._storage, "view_spec") else x
    return here.backend.export(shard_arrays(x)[0]) if type(x._storage) is Storage else x


def tensor_here(x: Any) -> Any:
    """Returns an array of the device of the calling program as a tensor; other objects as they are."""
    here = program_of(innermost())
    return x if here is None else adopted(here, x)
