"""Sharded tensors: NumPy-like arrays distributed over many devices of pluggable backends. See the README.

`shardtensor.public` lists the public names.
"""

# ruff: noqa: F403 - `import *` imports the public names for type checkers

import importlib as _importlib
import os as _os
import sys as _sys
import types as _types
import typing as _typing

if _os.name == "nt":  # Its parts that are imported on first use would fail one by one, by modules that Windows lacks.
    raise ImportError("shardtensor needs Linux, and this is Python for Windows; use one in WSL2, which is Linux")

import shardtensor.functions.placement.conversion
import shardtensor.functions.placement.shard_lists
import shardtensor.functions.standard.data_types
import shardtensor.functions.standard.joining
import shardtensor.interpreters.eager
import shardtensor.interpreters.partial_sum_reads  # reading an unreduced tensor adds its partial sums
import shardtensor.interpreters.recording  # noqa: F401 - it observes the logs
from shardtensor.backend.registry import after_loading as _after_loading
from shardtensor.backend.small_floats import SMALL_FLOATS as _SMALL_FLOATS
from shardtensor.backend.small_floats import small_float as _small_float
from shardtensor.communication.between_processes.forgotten import remind as _remind
from shardtensor.core import ABOVE as _ABOVE
from shardtensor.core import OPS as _OPS
from shardtensor.exports import modules_of_names as _modules_of_names
from shardtensor.functions.numpy.function_table import NUMPY_NAMES as _NUMPY_NAMES
from shardtensor.hints import explain_imports as _explain_imports
from shardtensor.hints import missing as _missing
from shardtensor.signatures import without_quotes as _without_quotes
from shardtensor.tracebacks import hide_from_pytest as _hide_from_pytest
from shardtensor.tracebacks import install as _install_hooks

__version__ = "0.2.0"
"""The version of the library."""

_modules = _modules_of_names("shardtensor.public")
for _name in _SMALL_FLOATS:
    del _modules[_name]  # `dir` and `import *` leave these out: they need ml_dtypes, which may not be installed.


def _public(name: str, module: _types.ModuleType) -> _typing.Any:
    """Returns what a public name stands for: an attribute of a module, or the module itself, as `shardtensor.fft`."""
    return _without_quotes(module if module.__name__ == f"{__name__}.{name}" else getattr(module, name))


for _name, _module in _modules.items():
    if _module in _sys.modules:
        globals()[_name] = _public(_name, _sys.modules[_module])
    else:
        _OPS.chapters[_name] = _module


_submodules = {name for name, module in _modules.items() if module == f"{__name__}.{name}"} - {*globals()}
"""The public modules of which `help` still shows quotes: modules below them may import them before a program does."""

_ABOVE.modules.update(
    Moved="shardtensor.pictures.traffic_picture",
    call_numpy="shardtensor.functions.numpy.translated_calls",
    call_ufunc="shardtensor.functions.ufunc_protocol.ufunc_calls",
    compiled="shardtensor.interpreters.jit.jit",
    described="shardtensor.pictures.display",
    dlpack_device="shardtensor.functions.interchange.dlpack_methods",
    elements_of="shardtensor.interpreters.views.scalar_elements",
    few_values="shardtensor.pictures.display",
    manual_axis_type="shardtensor.spmd.manual_types",
    mesh_html="shardtensor.pictures.html",
    printed="shardtensor.pictures.display",
    sharding_html="shardtensor.pictures.html",
    table_html="shardtensor.pictures.html",
    tensor_html="shardtensor.pictures.html",
    text_html="shardtensor.pictures.html",
    to_dlpack="shardtensor.functions.interchange.dlpack_methods",
    traffic_picture="shardtensor.pictures.traffic_picture",
    with_out="shardtensor.functions.numpy.translated_calls",
    write_elements="shardtensor.files.array_files",
)
_ABOVE["array_namespace"] = lambda: _sys.modules[__name__]


def _register_with_einops() -> None:
    """Makes tensors known to einops if the program has imported it by the time that it uses devices."""
    if "einops" in _sys.modules:
        _importlib.import_module("shardtensor.einops").register()  # Programs without einops do not need it.


_install_hooks()
_explain_imports()
_after_loading.append(_register_with_einops)
_after_loading.append(_remind)

if _typing.TYPE_CHECKING:
    from shardtensor.public import *
    from shardtensor.public import __array_api_version__ as __array_api_version__  # `import *` takes no underscores.
    from shardtensor.public import __array_namespace_info__ as __array_namespace_info__
else:  # Type checkers would take `__getattr__` for a definition of every name, and this `__all__` for an empty one.
    __all__ = sorted(["__version__", *_modules])

    def __getattr__(name: str) -> _typing.Any:
        if name in _SMALL_FLOATS:
            return _small_float(name).type
        if name in _NUMPY_NAMES:
            return globals()[_NUMPY_NAMES[name]]
        if name not in _modules and name != "testing":
            raise _missing(__name__, name)
        module = _importlib.import_module(_modules.get(name, f"{__name__}.{name}"))  # Programs need few of them.
        _hide_from_pytest(module)
        value = globals()[name] = _public(name, module)
        for imported in _submodules & {*globals()}:
            _submodules.discard(imported)
            _without_quotes(globals()[imported])
        return value

    def __dir__() -> list[str]:
        return __all__
