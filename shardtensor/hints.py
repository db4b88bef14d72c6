"""Errors about names of other libraries: of attributes, imports, arguments and devices, with what to write here.

A name with a row in `shardtensor.hint_tables` is one that does not exist: the error stays an `AttributeError` or an
`ImportError`, so that ``hasattr`` and ``getattr`` with a default answer as for any other name. The tables are imported
by the first error.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from inspect import Parameter
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from shardtensor.errors import type_text

Class = TypeVar("Class", bound=type)

LACKING = {
    "ShardedTensor": (
        "__delitem__ abs abs_ absolute acos add_ addmm addressable_data allclose angle append apply apply_ "
        "argwhere as_type asin asnumpy at atan atan2 aval backend_copy backend_transfer backward bfloat16 bincount "
        "bmm bool broadcast_to byte byteswap "
        "cat ceil char cholesky chunk chunks clamp clamp_ clone compute contiguous copy_ copy_to_host_async "
        "copysign corr corrcoef cos cosh count_nonzero cov cpu cross ctypes cuda data data_ptr delete describe "
        "det detach device_buffer device_buffers diag diff dim div div_ divide double dropna dump dumps eig eigh "
        "element_size eq equal erf exp exp2 exp_ expand expand_as expm1 fill_ fillna flip fliplr flipud float "
        "floor floor_divide fmax fmin fmod gather ge get get_device getfield global_shards grad grad_fn greater "
        "greater_equal groupby gt half head histc histogram hypot iloc index_add index_add_ index_select inner "
        "int inv inverse is_contiguous is_cpu is_cuda is_deleted is_ready isclose isfinite isinf isna isnan kron "
        "layout le lerp less less_equal loc log log10 log1p log2 log_ log_softmax logaddexp logical_and "
        "logical_not logical_or logical_xor logsumexp long lstsq lt map map_ masked_fill masked_fill_ "
        "masked_select matmul matrix_power maximum median minimum mm moveaxis movedim mul mul_ multiply mv "
        "nan_to_num nanmean nanmedian nansum ndimension ne neg negative nelement new_axis new_ones new_tensor "
        "new_zeros norm normal_ not_equal numel numpy on_device_size_in_bytes outer permute permute_dims persist "
        "pin_memory pinv platform plot pow pow_ qr quantile rechunk reciprocal register_hook relu remainder "
        "repeat_interleave requires_grad requires_grad_ reshape_as resize retain_grad roll rolling rot90 rsqrt "
        "save scatter scatter_ scatter_add scatter_add_ setfield short sigmoid sign sin sinc sinh slogdet softmax "
        "solve split sqrt sqrt_ square stride sub sub_ subtract svd swapdims t tail take_along_dim tan tanh "
        "tensor_split tensordot tile to to_batched to_csv to_flat_list to_list to_number toarray topk tril triu "
        "trunc type type_as unbind "
        "unfold uniform_ unique unsafe_buffer_pointer unsqueeze value_counts values vdot view_as weak_type where "
        "zero_"
    ),
    "Compiled": (
        "as_text cost_analysis input_formats input_shardings memory_analysis out_info output_formats output_shardings"
    ),
    "Device": (
        "addressable_memories client default_memory device_kind host_id index local_hardware_id memory memory_stats "
        "platform task_id type"
    ),
    "JitFunction": "clear_cache eval_shape trace",
    "Lowered": "args_info compiler_ir cost_analysis donate_argnums in_avals in_tree out_info out_tree",
    "Mesh": (
        "__enter__ abstract_device abstract_mesh are_all_axes_auto are_all_axes_explicit "
        "are_all_axes_explicit_or_manual are_all_axes_manual auto_axes axis_types device_ids empty explicit_axes "
        "is_multi_process is_scalar local_mesh manual_axes name shape_tuple update update_axis_types"
    ),
    "NamedSharding": (
        "addressable_devices_indices_map check_compatible_aval has_addressable_devices replicated_axes update"
    ),
    "PartitionSpec": "UNCONSTRAINED partitions unreduced_kind update",
    "ShapeDtypeStruct": "format is_ref manual_axis_type vma weak_type",
}
"""The names of the rows of `shardtensor.hint_tables.CLASSES`, so that importing the package does not import them."""

_ELSEWHERE = ("linalg", "random", "fft", "distributed", "optim", "data")
"""The modules whose names are looked for in the package itself."""


def _tables() -> Any:
    return importlib.import_module("shardtensor.hint_tables")  # Only errors need it.


def shown(text: str) -> str:
    """Returns the text of a row as a message shows it: without backticks, and as a sentence if it is only code."""
    only_code = re.fullmatch(r"`[^`]+`(?:(?:, or|,| or| and) `[^`]+`)*", text)
    return ("use " if only_code else "") + text.replace("`", "")


# -- attributes and imports ------------------------------------------------------------------------


def _error(owner: str, name: str, text: str | None) -> AttributeError:
    """Returns the error for a missing attribute. One with a hint names no object, in which Python would look for a name
    that is spelled alike, to add it to the hint.
    """
    message = f"{owner} has no attribute {name!r}"
    return AttributeError(f"{message}: {shown(text)}", name=name, obj=None) if text else AttributeError(message)


def missing(module: str, name: str) -> AttributeError:
    """Returns the AttributeError of a module that lacks a name, with its hint if there is one.

    Args:
        module: the full name of the module.
        name: the name.
    """
    return _error(f"module {module!r}", name, None if name.startswith("_") else _of_module(module, name))


def _of_module(module: str, name: str) -> str | None:
    """Returns the hint for a name that a module lacks, if there is one."""
    _, _, place = module.partition(".")
    text: str | None = _tables().MODULES.get(place, {}).get(name)
    if text is None and not place:
        homes = [home for home in _ELSEWHERE if name in getattr(sys.modules[module], home).__all__]
        return f"`st.{homes[0]}.{name}`" if homes else None
    return text


class Lacking:
    """Stands for an attribute of other libraries' objects that those of a class lack: the error says what to use.

    A method ``__getattr__`` would do so, too, but Python 3.11 does not specialize any look-up in a class that has one
    (``x[i]`` takes 7 % longer), and `numpy.asarray` would call it for each protocol that it tries before ``__array__``.
    """

    def __init__(self, owner: str, name: str) -> None:
        self._owner, self._name = owner, name

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # for ``help``
        return f"Not an attribute: {shown(_tables().CLASSES[self._owner][self._name])}."

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise _error(f"{owner.__name__!r} object", self._name, _tables().CLASSES[self._owner][self._name])


def explains_attributes(cls: Class) -> Class:
    """Makes the error for an attribute that objects of a class lack name what to use instead."""
    names = frozenset(LACKING[cls.__name__].split())
    for name in names:
        setattr(cls, name, Lacking(cls.__name__, name))

    def names_of(self: object) -> list[str]:
        return [name for name in object.__dir__(self) if name not in names]

    cls.__dir__ = names_of  # type: ignore[method-assign, assignment]
    return cls


class _Finder:
    """The last of Python's finders of modules: it explains imports of names of other libraries from this package.

    Python asks it only about modules that no other finder has, and ``from shardtensor import name`` asks for a module
    if the package has no such attribute.
    """

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns None for all modules.

        Raises:
            ImportError: the name has a hint, and it is imported (`importlib.util.find_spec` only asks whether it can
                be).
        """
        parent, _, last = name.rpartition(".")
        if parent.partition(".")[0] != "shardtensor" or last.startswith("_"):
            return None
        steps = _steps_of_import()
        text = _of_module(parent, last) if "_find_and_load" in steps else None
        if text is None:
            return None
        if "_handle_fromlist" in steps:
            raise ImportError(f"cannot import name {last!r} from {parent!r}: {shown(text)}", name=parent)
        raise ModuleNotFoundError(f"No module named {name!r}: {shown(text)}", name=name)


def _steps_of_import() -> set[str]:
    """Returns the names of the functions of Python's importlib that call the finder."""
    names, frame = set(), sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        names.add(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def explain_imports() -> None:
    """Makes errors of imports from the package name what to import."""
    if not any(type(finder).__name__ == "_Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


# -- arguments -------------------------------------------------------------------------------------


def wrong_arguments(
    name: str, parameters: Mapping[str, Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Returns the message of the error for a call with arguments that a function does not take, or lacks; None if it
    can be called with them.

    Args:
        name: the function.
        parameters: its parameters.
        args: the positional arguments.
        kwargs: the keyword arguments.
    """
    kinds = {n: p.kind for n, p in parameters.items()}
    if Parameter.VAR_KEYWORD not in kinds.values():
        for keyword in kwargs:
            if kinds.get(keyword, Parameter.POSITIONAL_ONLY) is Parameter.POSITIONAL_ONLY:
                return unexpected(name, list(parameters), keyword)
    by_position = [n for n, kind in kinds.items() if kind in (_BY_POSITION, Parameter.POSITIONAL_ONLY)]
    if len(args) > len(by_position) and Parameter.VAR_POSITIONAL not in kinds.values():
        return _too_many(name, parameters, by_position, len(args))
    if twice := [n for n in by_position[: len(args)] if n in kwargs]:
        return f"{name}: {twice[0]} is given twice, by position and by name"
    names = {*by_position[: len(args)], *kwargs}
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in _VARIADIC]
    lacking = [n for n in required if n not in names]
    several = "s" if len(lacking) > 1 else ""
    return (
        f"{name}: missing the argument{several} {' and '.join(lacking)}; it takes {', '.join(parameters)}"
        if lacking
        else None
    )


_BY_POSITION = Parameter.POSITIONAL_OR_KEYWORD
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _too_many(name: str, parameters: Mapping[str, Parameter], by_position: Sequence[str], count: int) -> str:
    """Returns the message of the error for too many positional arguments."""
    by_name = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    taken = f"by position it takes {', '.join(by_position) or 'none'}"
    more = f", and by name {', '.join(f'{n}=' for n in by_name)}" if by_name else ""
    return f"{name}: {count} positional arguments are given; {taken}{more}{of_call(name)}"


def of_call(name: str) -> str:
    """Returns the end of an error message about a call with one argument too many, or with an array in the place of
    another argument: what to write, such as how arrays are given to the function, if it takes them in a list.
    """
    text = _tables().POSITIONAL.get(name)
    return f"; {shown(text)}" if text else ""


def is_known(keyword: str) -> bool:
    """Whether other libraries have an argument of that name."""
    return keyword in _tables().KEYWORDS or keyword in _tables().ARGUMENTS


def similar(name: str, known: Sequence[str]) -> str:
    """Returns the end of the message for a name that does not exist, which has the one that may be meant."""
    close = importlib.import_module("difflib").get_close_matches(name, known, 1, 0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def unexpected(name: str, parameters: Sequence[str], keyword: str) -> str:
    """Returns the message of the error for an argument that a function does not take.

    Args:
        name: the function.
        parameters: the names of its parameters.
        keyword: the name of the argument.
    """
    tables = _tables()
    here = next((n for n in tables.KEYWORDS.get(keyword, "").split() if n in parameters and n != keyword), None)
    close = importlib.import_module("difflib").get_close_matches(keyword, parameters, 1, 0.7)
    if keyword in parameters:
        advice = f"{keyword} is given by position only"
    elif here:
        advice = f"it is called {here} here"
    elif text := tables.ARGUMENTS.get(f"{name}.{keyword}", tables.ARGUMENTS.get(keyword)):
        advice = shown(text)
    elif close:
        advice = f"did you mean {close[0]}?"
    else:
        advice = f"it takes {', '.join(parameters) or 'none'}"
    return f"{name}: got an unexpected keyword argument {keyword!r}; {advice}"


# -- values ----------------------------------------------------------------------------------------


def of_value(x: object) -> str:
    """Returns what an error message says about an object that is not an array, but can be made one; empty for others.

    >>> from shardtensor import hints
    >>> hints.of_value(st.shard(st.ones(4)))
    'a list of shards, which st.unshard(shards) joins'
    """
    if type(x) in (list, tuple) and any(type(item).__name__ == "ShardedTensor" for item in x):  # type: ignore[attr-defined]
        return "a list of shards, which st.unshard(shards) joins"
    if type(x).__module__.partition(".")[0] in ("pandas", "polars"):
        return f"{type_text(x)}, which st.asarray converts"
    return ""


_BACKENDS = {"gpu": "cupy", "cuda": "cupy", "rocm": "cupy", "cpu": "numpy", "host": "numpy"}


def of_device(text: object) -> str:
    """Returns the end of an error message about a text in the place of a device or of the name of a backend: the
    devices that it names in other libraries. It is empty for any other object.

    >>> from shardtensor import hints
    >>> hints.of_device("cuda:1")
    "; st.devices('cupy')[1] is such a device, and st.devices('cupy') are all of them"
    """
    if not isinstance(text, str):
        return ""
    name, _, number = text.lower().partition(":")
    backend = _BACKENDS.get(name, name)
    if backend not in ("cupy", "numpy", "torch", "checked"):
        return "; st.devices() lists the devices, and st.backend_names() the backends"
    known = f"st.devices({backend!r})"
    return f"; {known}[{number if number.isdigit() else 0}] is such a device, and {known} are all of them"
