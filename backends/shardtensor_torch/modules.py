"""Modules of PyTorch for the programs of maps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from shardtensor.backend import Device, is_remote, load
from shardtensor.errors import ArgumentTypeError

__all__ = ["replicate"]

_CUDA = 2
"""The type of the memory of CUDA's devices in DLPack."""


def replicate(module: Any, devices: Sequence[Device] | None = None) -> list[Any]:
    """Returns a copy of a module for each device, on that device, as a list over which `st.pmap` maps.

    Each program of a map then has parameters, gradients, buffers and modes (``train`` and ``eval``) of its own, which
    keep what it does to them. Programs that apply equal gradients keep equal parameters, those of ``replicas[0]`` for
    example, whose ``state_dict()`` the module can load.

    Args:
        module: a `torch.nn.Module`, or another object that `copy.deepcopy` copies and that has a method ``to``.
        devices: devices of the backend ``torch``; by default all of them.

    Returns:
        The copies in order of the devices; None in place of those for devices of other processes.

    Raises:
        ArgumentTypeError: ``module`` is not a module, or ``devices`` has others than those of the backend ``torch``.
    """
    if not hasattr(module, "state_dict") or not hasattr(module, "to"):
        raise ArgumentTypeError(f"replicate: module is {type(module).__name__}; wanted a torch.nn.Module")
    backend = load("torch")
    chosen = list(backend.devices() if devices is None else devices)
    for device in chosen:
        if getattr(device, "backend", None) != "torch":
            raise ArgumentTypeError(
                f"replicate: devices has {device!r}; wanted devices of the backend torch, as st.devices('torch') has"
            )
    copies: list[Any] = []
    for device in chosen:
        if is_remote(device):
            copies.append(None)
            continue
        with backend.on(device):
            replica = copy.deepcopy(module)
            copies.append(replica.to("cuda") if backend.dlpack_device(device)[0] == _CUDA else replica)
        backend.make_caller_wait(device)
    return copies
