"""Gradients of collectives by PyTorch's automatic differentiation. Importing this module imports torch.

A collective is a `torch.autograd.Function` whose backward pass calls the transposed collective. There, a program waits
for the others, which its thread may have to run meanwhile. PyTorch has one queue for all backward passes of a thread,
which would take the work of each other. Therefore those of programs that have recorded a collective run in threads of
their own (`shardtensor.backend.beside_program`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.autograd.variable import Variable

from shardtensor.backend import beside_program, current_device
from shardtensor.errors import BackendError

__all__ = ["install", "is_recorded", "modes", "record_call", "vjp"]

Transpose = Callable[..., Mapping[int, Any]]

_recorded: ContextVar[int] = ContextVar("shardtensor_torch_recorded", default=0)
"""How many collectives the program has recorded."""


class _Call(NamedTuple):
    """A collective: what computes it, and its transpose; see `shardtensor.backend.Backend.record_call`."""

    function: Callable[..., Sequence[Any]]
    transpose: Transpose
    saves: bool


class Collective(torch.autograd.Function):  # type: ignore[misc]
    """A collective as a function of its leaves, the first argument being a `_Call`."""

    @staticmethod
    def forward(call: _Call, *leaves: Any) -> tuple[Any, ...]:
        """Calls the collective. Programs may receive the same tensor, of which each needs an object of its own."""
        with _outside_of_functions():
            results = call.function(*leaves)
        return tuple([y.detach() if isinstance(y, torch.Tensor) else y for y in results])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Saves what the transpose needs."""
        call, *leaves = inputs
        ctx.transpose, ctx.saved = call.transpose, []  # Its function refers to the leaves, which need not be kept.
        ctx.shapes = {k: tuple(x.shape) for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        constant = [
            y
            for x, y in zip(leaves, output, strict=True)
            if isinstance(y, torch.Tensor) and not (isinstance(x, torch.Tensor) and x.requires_grad)
        ]
        ctx.mark_non_differentiable(*constant)
        if call.saves:
            ctx.save_for_backward(*[x for x in (*leaves, *output) if isinstance(x, torch.Tensor)])
            ctx.saved = [k for k, x in enumerate((*leaves, *output)) if isinstance(x, torch.Tensor)]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Calls the transposed collective."""
        count = len(cotangents)
        active = {k: g for k, g in enumerate(cotangents) if ctx.needs_input_grad[k + 1]}
        known = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        leaves = {k: x for k, x in known.items() if k < count}
        results = {k - count: x for k, x in known.items() if k >= count}
        gradients = ctx.transpose(active, ctx.shapes, leaves, results)
        return (None, *[gradients.get(k) for k in range(count)])

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Raises BackendError."""
        raise BackendError(
            "a collective inside torch.func.vmap, which does not support it; apply it to the results of vmap"
        )


_interpreter = torch._C._functorch.peek_interpreter_stack
_forward_mode = torch.autograd.forward_ad


def is_recorded(leaves: Sequence[Any]) -> bool:
    """See `TorchBackend.is_recorded`."""
    for x in leaves:
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            return True
    return _interpreter() is not None or (_forward_mode._current_level >= 0 and have_tangents(leaves))


def have_tangents(leaves: Sequence[Any]) -> bool:
    """Whether forward-mode differentiation is active for one of the leaves, which need not be tensors."""
    if _forward_mode._current_level < 0:  # The level is that of all threads.
        return False
    return any(isinstance(x, torch.Tensor) and _forward_mode.unpack_dual(x).tangent is not None for x in leaves)


def record_call(
    function: Callable[..., Sequence[Any]], transpose: Transpose, leaves: Sequence[Any], number: int, saves: bool
) -> Sequence[Any]:
    """See `shardtensor.backend.Backend.record_call`.

    Raises:
        BackendError: a tensor has a tangent.
    """
    if have_tangents(leaves):
        raise BackendError(
            "a collective inside forward-mode differentiation (torch.func.jvp), which does not support it; use "
            "torch.func.grad or torch.func.vjp"
        )
    _recorded.set(number + 1)
    results: Sequence[Any] = Collective.apply(_Call(function, transpose, saves), *leaves)
    for y in results:
        if isinstance(y, torch.Tensor) and y.grad_fn is not None:
            # The engine takes the node of the greatest number first, so that collectives come after all other nodes,
            # and in the same order in all programs: nodes that were made earlier have smaller numbers.
            y.grad_fn._set_sequence_nr(number)
            break
    return results


# -- modes -----------------------------------------------------------------------------------------

_KINDS = ("cpu", "cuda")
"""The kinds of devices of which PyTorch's autocast has a mode each."""

_autograd, _functorch = torch._C._autograd, torch._C._functorch

_is_recording, _set_recording = torch.is_grad_enabled, torch._C._set_grad_enabled
_top_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # PyTorch 2.6 may lack it.
_is_casting = torch._C._is_any_autocast_enabled


def modes() -> Callable[[], None]:
    """Returns a function that sets the present modes of this thread in the thread that calls it: whether gradients are
    recorded, the default hooks of saved tensors, and autocast.
    """
    if _top_hooks(True) is None and not _is_casting():
        return _recording if _is_recording() else _not_recording
    hooks = _pop_hooks()
    _push_hooks(hooks)
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    return functools.partial(_set_modes, _is_recording(), hooks, casts, torch.is_autocast_cache_enabled())


def _set_modes(recording: bool, hooks: Sequence[Any], casts: Sequence[tuple[bool, Any]], caches: bool) -> None:
    _set_recording(recording)
    _pop_hooks()
    _push_hooks(hooks)
    for kind, (enabled, dtype) in zip(_KINDS, casts, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(caches)


_NO_CASTS = [(False, torch.get_autocast_dtype(kind)) for kind in _KINDS]


def _recording() -> None:
    _set_recording(True)
    if _top_hooks(True) is not None or _is_casting():
        _set_modes(True, (), _NO_CASTS, True)


def _not_recording() -> None:
    _set_recording(False)
    if _top_hooks(True) is not None or _is_casting():
        _set_modes(False, (), _NO_CASTS, True)


@contextlib.contextmanager
def _outside_of_functions() -> Iterator[None]:
    """Sets the modes that PyTorch and `torch.func` set around a `torch.autograd.Function` to their defaults.

    Other programs may run in the block. The mode of recording is left to `modes`.
    """
    forward, error = torch._C._is_fwd_grad_enabled(), _autograd._saved_tensors_hooks_get_disabled_error_message()
    single_level = _functorch.get_single_level_autograd_function_allowed()
    torch._C._set_fwd_grad_enabled(True)
    _functorch.set_single_level_autograd_function_allowed(False)
    if error is not None:
        _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        torch._C._set_fwd_grad_enabled(forward)
        _functorch.set_single_level_autograd_function_allowed(single_level)
        if error is not None:
            _autograd._saved_tensors_hooks_disable(error)


def _pop_hooks() -> list[Any]:
    """Removes the default hooks of saved tensors and returns them, outermost first."""
    default_hooks = []
    while (hooks := _top_hooks(True)) is not None:
        default_hooks.append(hooks)
        _autograd._pop_saved_tensors_default_hooks()
    return default_hooks[::-1]


def _push_hooks(hooks: Sequence[Any]) -> None:
    for pack, unpack in hooks:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)


# -- the engine ------------------------------------------------------------------------------------


class Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """PyTorch's engine of backward passes, which runs some of them beside their programs.

    That is necessary where a program has recorded a collective. Other backward passes may call collectives, too, in
    hooks and in functions of the user: while such a program is suspended, the backward passes of others in its thread
    run elsewhere. On GPUs, all those of programs do: the engine has one thread for the nodes of a GPU, which programs
    share.
    """

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See PyTorch."""
        function, count = functools.partial(super().run_backward, *args, **kwargs), _recorded.get()
        if current_device() is None:
            return function()
        running = getattr(_thread, "running", None)
        if count or torch.cuda.is_available() or running not in (None, _running.get()):
            return _beside(function, count)
        token = _running.set(_running.get() or object())
        _thread.running = _running.get()
        try:
            return function()
        finally:
            _thread.running = running
            _running.reset(token)


_running: ContextVar[object | None] = ContextVar("shardtensor_torch_running", default=None)
"""Identifies the program whose backward pass runs in its own thread."""

_thread = threading.local()  # Its attribute `running` is that of the program whose backward pass runs in the thread.


def install() -> None:
    """Replaces PyTorch's engine by an `Engine`."""
    if type(Variable._execution_engine) is not Engine:
        Variable._execution_engine = Engine()


def _beside(function: Callable[[], Any], count: int) -> Any:
    """Calls a function that runs a backward pass in a thread beside the program, with the modes of this thread."""
    layers = _pop_layers()
    restore, streams = modes(), _streams()

    def run() -> Any:
        restore()
        _push_layers(layers)
        try:
            # All nodes run in this thread, also those of a GPU, whose own thread would serve several programs.
            with torch.autograd.set_multithreading_enabled(False), streams:
                _count_nodes(count)
                return function()
        finally:
            _pop_layers()

    try:
        with _outside_of_functions():
            return beside_program(run)
    finally:
        _push_layers(layers)


def _streams() -> Any:
    """Returns a context manager in which the stream of this thread is current."""
    return torch.cuda.stream(torch.cuda.current_stream() if torch.cuda.is_available() else None)


def _pop_layers() -> list[Any]:
    """Removes the `torch.func` transformations from this thread and returns them, outermost first."""
    functorch, layers = torch._C._functorch, []
    while functorch.peek_interpreter_stack() is not None:
        layers.append(functorch.pop_dynamic_layer_stack())
    return layers[::-1]


def _push_layers(layers: Sequence[Any]) -> None:
    for layer in layers:
        torch._C._functorch.push_dynamic_layer_stack(layer)


def _count_nodes(count: int) -> None:
    """Creates nodes until their numbers, counted in each thread, are greater than those of recorded collectives."""
    one = torch.ones((), requires_grad=True)
    with torch.enable_grad():
        while torch._C._autograd._get_sequence_nr() <= count:
            one * 1


# -- functions that call PyTorch directly ----------------------------------------------------------


class _Same(torch.autograd.Function):  # type: ignore[misc]
    """Returns its argument as another tensor in the same memory, of which PyTorch does not know that it is a view."""

    @staticmethod
    def forward(x: Any) -> Any:
        """See the class."""
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """Passes the cotangent on."""
        return g


def vjp(function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, Callable[..., Sequence[Any]]]:
    """See `shardtensor.backend.Backend.vjp`."""
    inputs = [x.detach().requires_grad_(x.dtype.is_floating_point or x.dtype.is_complex) for x in arrays]
    with torch.enable_grad():
        # The function may write to its arguments, which must not be leaves or views of leaves then.
        results = function(*[_Same.apply(x) if x.requires_grad else x for x in inputs])
    count = _recorded.get()
    taped = [y for y in results if isinstance(y, torch.Tensor) and y.requires_grad]
    active = [x for x in inputs if x.requires_grad]

    def pull(cotangents: Sequence[Any], keep: bool = False) -> Sequence[Any]:
        # PyTorch multiplies by the conjugate of the Jacobian.
        seeds = [
            torch.zeros_like(y) if g is None else torch.conj_physical(g)
            for y, g in zip(results, cotangents, strict=True)
            if isinstance(y, torch.Tensor) and y.requires_grad
        ]
        token = _recorded.set(max(count, _recorded.get()))
        try:
            products = torch.autograd.grad(taped, active, seeds, keep, allow_unused=True) if taped and active else ()
        finally:
            _recorded.reset(token)
        remaining = iter(products or [None] * len(active))
        gradients = [next(remaining) if x.requires_grad else None for x in inputs]
        return [None if g is None else torch.conj_physical(g) for g in gradients]

    return [y.detach() if isinstance(y, torch.Tensor) else y for y in results], pull
