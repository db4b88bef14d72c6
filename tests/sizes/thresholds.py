"""The sizes on which the library's ways to compute a result depend, and processes in which they are other numbers.

A threshold is a constant of a module. In a process with a low threshold, small arrays take the way of large ones: every
function runs on both sides of each, with arrays of a few elements.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import random
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("shardtensor", "backends/shardtensor_cupy", "backends/shardtensor_numpy", "backends/shardtensor_torch")

THRESHOLDS: dict[str, dict[str, Any]] = {
    "shardtensor_cupy.kernels.casts": {"_FEW": 1},
    "shardtensor_cupy.copies": {"_REUSED_FROM": 1},
    "shardtensor_cupy.kernels.elementwise_kernel": {"_REGISTERS": 16},
    "shardtensor_cupy.kernels.large_reductions": {"LEAST": 1, "_SHORTEST": 2},
    "shardtensor_cupy.kernels.line_scans": {"LONG": 2},
    "shardtensor_cupy.kernels.searches": {"_DIMENSIONS": 1},
    "shardtensor_cupy.kernels.number_sequences": {"_TAPS": 2},
    "shardtensor_cupy.kernels.quantile_kernels": {"_MOST": 1},
    "shardtensor_cupy.kernels.large_ufuncs": {"LARGE": 1},
    "shardtensor.communication.between_processes.sums_across_processes": {"_BLOCK": 64},
    "shardtensor.communication.all_reduce": {"CHUNKED_FROM": 1},
    "shardtensor.communication.array_communicator": {"_BLOCK": 64, "_BLOCKS": 2, "_DIVIDED_FROM": 1},
    "shardtensor.communication.between_memories": {"COLLECTED": 0},
    "shardtensor.communication.gather_scatter": {"AT_ONCE": 16},
    "shardtensor.communication.merging": {"MERGED_AT_ONCE": 2, "_ARGUMENT_WORDS": 12},
    "shardtensor.communication.messages": {"_PACKED_UP_TO": 0},
    "shardtensor.communication.between_processes.processes": {"_SAMPLED_FROM": 16, "_SAMPLE": 4},
    "shardtensor.communication.between_processes.rounds": {"MOST": 64},
    "shardtensor.communication.schedules": {"_AT_A_TIME": 4},
    "shardtensor.communication.transfer_log": {"_AT_A_TIME": 2},
    "shardtensor.communication.transfer_plan": {"_FILLED": 0, "_BOXES": 0},
    "shardtensor.functions.fft.chirp_fft": {"PIECE": 4, "_MOST": 2},
    "shardtensor.functions.algorithms.distinct": {"SAMPLES": 1, "PIECE": 2, "PIECE_ON_DEVICE": 2},
    "shardtensor.functions.linalg.elimination": {"_BASE": 1},
    "shardtensor.functions.algorithms.first_device": {"GATHERED": 0},
    "shardtensor.functions.linalg.panels": {"GATHERED": 1, "PANEL": 2, "SCRATCH": 16},
    "shardtensor.functions.algorithms.requests": {"ROUND": 4},
    "shardtensor.functions.fft.roots_of_unity": {"THREADED": 1, "_PARTS": 2},
    "shardtensor.functions.algorithms.scan": {"_FEW_BYTES": 0, "_FEW_ON_DEVICES": 0, "_ROW": 2, "_LINES": 1, "_BLOCK": 4},
    "shardtensor.functions.algorithms.run_selection": {"CANDIDATES": 8},
    "shardtensor.functions.algorithms.top_k": {"_SELECTED_FROM": 1},
    "shardtensor.functions.fft.transpose_fft": {"_GATHERED": 1},
    "shardtensor.functions.linalg.tsqr": {"_BLOCK": 4},
    "shardtensor.functions.numpy.differences": {"_BLOCK": 2, "_FEW": 1, "_PRODUCTS": 8},
    "shardtensor.functions.statistics.histograms": {"_PART": 2, "PIECE": 4},
    "shardtensor.functions.linalg.equations": {"_FEW": 1},
    "shardtensor.functions.derivatives.of_products": {"_FEW_PRODUCTS": 1},
    "shardtensor.functions.building.monoids": {"_ROW": 2},
    "shardtensor.files.npy_files": {"_BLOCK": 16},
    "shardtensor.functions.numpy.products": {"SMALL": 1, "_FEW": 1},
    "shardtensor.functions.random.random_elements": {"_HOST_PIECE": 12, "_HOST_PIECES": 1, "_PIECE": 12},
    "shardtensor.functions.standard.repetition": {"_SMALL": 1, "_JOINED": 2},
    "shardtensor.functions.ufunc_protocol.ufunc_methods": {"_SORTED_ELEMENT": 0},
    "shardtensor.functions.building.unsplit_lines": {"_LARGE": 1},
    "shardtensor.host.blockwise": {
        "LONG": 0.0, "_CACHE": 1, "_BLOCK": 8, "_LEAST": 2, "_TILE": 2, "_STEP": 2, "_LEAST_MASKED": 1, "_SELECTED": 32,
        "_ROWS": 2,
    },
    "shardtensor.host.fourier": {"_LONG": 1, "_BLOCK": 4, "_STRIP": 4, "_ROWS": 2},
    "shardtensor.host.memory_pool": {"POOLED_FROM": 1, "_KEPT": 4, "_CHECKED_FROM": 1},
    "shardtensor.host.host_searching": {
        "_BLOCK": 8, "_DIVIDED_FROM": 4, "_SEARCHED_IN_ORDER": 1, "_SEARCHED": 2, "_BUCKETS": 4,
    },
    "shardtensor.host.host_selection": {
        "_SELECTED_FROM": 4, "_INTEGERS_FROM": 4, "_WINDOWS": 2, "_KEPT": 2, "_BLOCK": 64, "_ROWS": 8, "_SORTED_UP_TO": 2, "_REPEATED_FROM": 4,
        "_SAMPLE": 2, "_DEVIATIONS": 1,
    },
    "shardtensor.host.host_sorting": {
        "_BLOCK": 8, "_COLUMNS": 1, "_TILE": 2, "_SHORT": 2, "_DIVIDED_FROM": 4,
        "_RANGES": 2, "_SAMPLES": 2, "_COUNTED": 4, "_COUNTED_FROM": 2,
        "_PART": 2, "_PIECES": 2,
    },
    "shardtensor.host.uniform_bins": {"_COUNTED_FROM": 2, "_BLOCK": 4, "_PART": 8, "_SPARSE": 2, "_NEAR": 2, "_BINS": 4},
    "shardtensor.interpreters.execution.blocked_reduction": {
        "_BLOCK": 4, "_BLOCKS": 2, "_LARGE": 16, "_CACHED": 4, "_WIDTH": 2, "_FACTORS": (2, 3, 32), "_ROWS": 2,
        "_SQUARE": (2, 2, 32), "_PLAIN": (2, 2, 16), "_DEPTH": (2, 8), "_BLAS_ALONE": 1, "_BLAS_ALONE_THIN": 1,
    },
    "shardtensor.interpreters.execution.cell_products": {"_MOST_BYTES": 0},
    "shardtensor.interpreters.execution.cell_reduction": {"_TERMS": 1},
    "shardtensor.interpreters.execution.one_pass": {"_FEW_BYTES": 0},
    "shardtensor.interpreters.execution.product_layouts": {"GATHERED": 0},
    "shardtensor.interpreters.execution.small_float_calls": {"_LARGE": 1},
    "shardtensor.interpreters.jit.kernels.numpy_executor": {"BLOCK": 8, "_LEAST": 2, "MOST_ROW": 8, "_TASK": 16, "_TASKS": 2},
    "shardtensor.interpreters.jit.c.c_executor": {
        "_ALIGNED": 2, "_LONG_ROW": 2, "STEPS": 2, "_BAND": 8, "_WIDTH": 2, "_HALVES": 2,
        "_PIECE": 1e-9, "_LAST_PIECE": 1e-9, "_CHUNK": 1e-9,
    },
    "shardtensor.interpreters.jit.c.c_source": {"LANES": 2, "SEGMENT": 4, "_LONG": 1, "_SHORT": 1},
    "shardtensor.interpreters.jit.c.c_loops": {"_UNKNOWN": 1},
    "shardtensor.interpreters.jit.c.c_trips": {"CHUNK": 0.0, "_FIRST": 1, "_GROWTH": 1, "_NUMBERS": 2},
    "shardtensor.interpreters.jit.rewrites.common_sums": {"_MOST_BYTES": 64, "_LARGE_BYTES": 16},
    "shardtensor.interpreters.jit.executable": {"_LARGE": 1},
    "shardtensor.interpreters.jit.grouping.fused": {"_CALL": 1},
    "shardtensor.interpreters.jit.grouping.fused_alone": {"MOST": 8},
    "shardtensor.interpreters.jit.grouping.groups": {"LEAST": 1, "_MOST": 2},
    "shardtensor.interpreters.jit.cuda.graphs": {"GRAPHS": 1, "SEEN": 2, "COST": 1},
    "shardtensor.interpreters.jit.kernels.kernel_operands": {"_WORK": 0},
    "shardtensor.interpreters.jit.cuda.segments": {"MOST_BYTES": 16},
    "shardtensor.interpreters.jit.c.temporal_blocking": {"LEAST_BYTES": 0, "ROWS": 0},
    "shardtensor.interpreters.views.scalar_elements": {"_TOGETHER": 2},
    "shardtensor.interpreters.writes.scattered_on_device": {"_DENSE": 0},
    "shardtensor.interpreters.views.views": {"_MOST_REPEATED": 1},
    "shardtensor.interpreters.writes.writes": {"_FEW": 1},
    "shardtensor.interpreters.small_results": {"_MOST_BYTES": 0, "_MOST_ITEMS": 1, "_LARGE_BYTES": 0},
}  # fmt: skip
"""The thresholds of each module, and a number for each with which a few elements are many."""

OTHERS = {
    "settings of programs and of processes": """
        demo.DEFAULT_DEVICES demo.DEFAULT_STEPS demo.HELD_OUT demo.SEED launcher.TIMED_OUT
        checkpoint.saving._THREADS
        communication.mpi_engine._FINALIZES communication.mpi_engine._LONGEST communication.mpi_engine._SPINS
        communication.mpi_engine._YIELDS host.threads.MOST_THREADS interpreters.jit.c.compiler._TIMEOUT
        spmd.scheduling.helper_delays._LONG spmd.scheduling.helper_delays._SHORT spmd.scheduling.scheduler._ROOM""",
    "seconds, and seconds of one step": """
        communication.gloo_engine._CHECKS communication.gloo_engine._CONNECTED communication.gloo_engine._POLL
        communication.gloo_engine._SIGNS communication.between_processes.lifelines._PAUSE communication.mpi_engine._SIGNS distributed._TOGETHER
        host.blockwise.BYTE host.blockwise._CACHED_BYTE host.threads._SHUTDOWN_WAIT
        interpreters.execution.blocked_reduction._MULTIPLICATION interpreters.jit.c.c_executor._FUNCTION
        interpreters.jit.c.c_loop_library._SECONDS
        interpreters.jit.c.compiler._POLL interpreters.jit.c.kernel_files.MOST_SECONDS
        interpreters.jit.c.kernel_files._ABANDONED launcher.GRACE launcher._PATIENCE launcher._POLL
        checkpoint.saving._POLL checkpoint.saving._PATIENCE
        communication.between_processes.agreement._MOMENT cupy.nccl_engine._LOOK cupy.nccl_engine._POLL
        cupy.nccl_link._ARRIVING cupy.nccl_link._PATIENCE cupy.nccl_link._POLL
        communication.gloo_engine._NOTICED job_output.HELD job_output._PRINTED spmd.scheduling.scheduler._POLL""",
    "texts and pictures": """
        communication.between_processes.agreement._MESSAGE communication.between_processes.difference._LINE communication.between_processes.difference._SIZE
        communication.between_processes.rounds._LISTED pictures.traffic_picture._NAMES pictures.traffic_picture._NUMBERS
        pictures.traffic_picture._PIXELS pictures.traffic_picture._ROWS pictures.traffic_picture._WIDTH
        host.limits._SHOWN pictures.html._BLOCKS pictures.html._CHARACTER pictures.html._LEAST_SIDE pictures.html._SIDE
        pictures.visualize._CELL pictures.visualize._LINES job_output._MOST
        tensor.identity._LONGEST""",
    "sizes of caches": """
        communication.between_processes.agreement._KEPT host.threads._KEPT interpreters.on_device._AVALS interpreters.infer._KEPT interpreters.nan_checks._KEPT
        interpreters.jit.jit._KEPT interpreters.jit.c.c_executor._LAYOUTS interpreters.jit.c.c_executor._MOST
        interpreters.jit.cuda.cuda_executor._LAYOUTS
        interpreters.jit.c.kernel_files.MOST_BYTES interpreters.views.views._MOST_KNOWN
        spmd.scheduling.assistant._KEPT spmd.maps.call_places._MOST_KNOWN spmd.maps.shard_map._KEPT spmd.manual_types._MOST_NOTED
        interpreters.small_results._MOST_LAYOUTS sharding.mesh._KEPT spmd.maps.captured._MOST
        spmd.scheduling.helper_delays._REMEMBERED spmd.scheduling.workers._KEPT tensor.value._FEW cupy.kernels.elementwise_kernel._LAYOUTS
        cupy.kernels.large_reductions._LAYOUTS cupy.kernels.large_reductions._STREAMS""",
    "sizes of formats, of dtypes and of limits of other libraries": """
        backend.device.HOST_MEMORY backend.protocol.MOST_DEVICES backend.small_floats._FIRST_OF_USERS
        communication.between_processes.agreement.SHORT communication.gloo_engine._CHUNK communication.between_processes.lifelines._LEFT
        communication.between_processes.lifelines._TOKEN communication.mpi_engine._CHUNK
        communication.between_processes.process_traffic._NUMBER communication.schedules.HOST_ID distributed._DEVICE distributed._DIGEST
        functions.interchange.dlpack_memory._ON_HOST functions.statistics.histograms._MOST_BINS files.npy_files._LONGEST_HEADER
        functions.standard.repetition._NEVER_WRAPS
        host.limits._NO_LIMIT host.trusted_paths._MOST_LINKS interpreters.jit.grouping.fused_in_maps.COMPILED
        interpreters.jit.c.c_executor._COPIED interpreters.jit.c.c_trips.ENDLESS
        interpreters.jit.c.kernel_files._DIGEST torch.elementwise._E4M3FN_ENDS torch.modules._CUDA cupy.logical_device._LEGACY
        cupy.nccl_engine._DIGEST cupy.nccl_engine._ID cupy.nccl_engine._OLDEST
        cupy.kernels.bfloat16_products._NO_REDUCED_SUMS cupy.kernels.large_reductions._OF_THREAD""",
    "thresholds of files, checkpoints and batches, which their tests have on both sides": """
        checkpoint.pieces.BLOCK checkpoint.pieces._SENT_FROM checkpoint.plans._SUMMED checkpoint.saving._SMALL
        data.batches._DRAWN
        files.ahead.HELD files.atomic._BEGUN files.atomic._BLOCK files.box_reader._OPEN files.box_reader._TASK
        files.box_reader._SLAB files.byte_ranges._PAGE files.byte_ranges._SLAB files.byte_ranges._SPAN files.checksums._LANES
        files.checksums._STEPS files.chunk_grids._ROW files.joint_writes._LEAST_RUN files.joint_writes._ROUND
        files.paths._BLOCK files.row_reads._CACHED files.zarr._AHEAD files.zarr._SLAB""",
    "sizes of files, and numbers by which they are defined": """
        checkpoint.manager._DIGITS checkpoint.manager._LAST checkpoint.manifest.VERSION checkpoint.manifest._MOST checkpoint.manifest._TRIES
        checkpoint.saving._MOST checkpoint.trees.DEEPEST checkpoint.trees._LONGEST
        files.atomic._LONGEST files.checksums._LANE files.checksums._ONE files.checksums._ONES
        files.checksums._POLYNOMIAL files.metadata.HOLE files.metadata.MOST files.metadata.DIMENSIONS
        files.metadata.LARGEST files.safetensors_files._MOST""",
    "alignments": """
        communication.array_communicator._LINE host.memory_pool._LINE interpreters.jit.cuda.graphs._ALIGNMENT""",
    "random numbers, which are defined by them": """
        data.order._EPOCHS data.order._ROUNDS
        functions.random.discrete_distributions._FEW functions.random.discrete_distributions._LEAST_LIKELY functions.random.discrete_distributions._MOST
        functions.random.numbers_of_words._LOW functions.random.random_elements._ATTEMPTS functions.random.random_kernel._NARROW functions.random.random_keys._WORD
        host.philox.MULTIPLIERS host.philox.ROUNDS host.philox.WEYL host.philox.WORD host.philox.WORDS
        host.philox._COUNTERS host.philox._LOW host.host_selection._BITS host.host_selection._MULTIPLIER host.uniform_bins._BITS host.normals.END host.normals.LAYERS""",
    "where series and continued fractions of special functions begin and end": """
        functions.building.special._FAR functions.building.special._GREAT functions.building.special._LAST_TERM functions.building.special._TAIL""",
    "coefficients of a published algorithm": "optim.orthogonalization.NS_COEFFS",
    "sizes from which there is an error": "functions.linalg.equations._GATHERED",
    "kernels of CUDA, whose tests have arrays of all sizes on a GPU": """
        functions.random.random_kernel._THREADS interpreters.jit.cuda.cuda_executor.BLOCKS interpreters.jit.cuda.cuda_executor.SEGMENT
        interpreters.jit.cuda.cuda_executor._BLOCK interpreters.jit.cuda.cuda_executor._PARAMETERS
        interpreters.jit.cuda.cuda_source.MOST_THREADS cupy.kernels.casts._ROWS cupy.kernels.casts._TILE
        cupy.kernels.elementwise_kernel._MOST cupy.kernels.elementwise_kernel._PACK
        cupy.kernels.elementwise_kernel._SINGLY cupy.kernels.elementwise_kernel._THREADS
        cupy.kernels.reduction_kernels.MOST cupy.kernels.reduction_kernels.PACK cupy.kernels.reduction_kernels.THREADS
        cupy.kernels.reduction_kernels._AT_LAST cupy.kernels.reduction_kernels._RADIX
        cupy.kernels.large_reductions._CHUNKS cupy.kernels.large_reductions._CHUNKS_OF_COLUMNS
        cupy.kernels.large_reductions._COUNTERS cupy.kernels.large_reductions._EACH cupy.kernels.large_reductions._LANES
        cupy.kernels.line_scans._EACH cupy.kernels.line_scans._ROWS cupy.kernels.line_scans._THREADS
        cupy.kernels.searches._BLOCKS cupy.kernels.searches._COUNTS cupy.kernels.searches._EACH
        cupy.kernels.searches._EDGES cupy.kernels.searches._SAMPLES cupy.kernels.searches._THREADS
        cupy.kernels.quantile_kernels._THREADS
        cupy.kernels.searches._TOGETHER cupy.kernels.number_sequences._EACH cupy.kernels.number_sequences._THREADS""",
}
"""All other numbers that are constants of modules, by what they are; `shardtensor.` and `shardtensor_` are left out."""


def constants() -> set[tuple[str, str]]:
    """Returns the modules and names of all constants of the code that are numbers, or tuples of numbers."""
    found = set()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder.rpartition("/")[0]).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            if not module.startswith("shardtensor.testing"):
                known: dict[str, Any] = {}
                names = [_assigned(node, known) for node in ast.parse(path.read_text()).body]
                found |= {(module, name) for name in names if name}
    return found


def _assigned(node: ast.stmt, known: dict[str, Any]) -> str:
    """Returns the name to which a statement of a module assigns numbers as a constant; else an empty string.

    Args:
        node: the statement.
        known: the constants of the module, to which this one is added.
    """
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    value = getattr(node, "value", None)
    if not isinstance(target, ast.Name) or not re.fullmatch(r"_?[A-Z][A-Z0-9_]*", target.id) or value is None:
        return ""
    try:
        number = eval(compile(ast.Expression(value), "", "eval"), {"__builtins__": {}}, known)
    except (NameError, TypeError, AttributeError):  # It has names of other things than numbers.
        return ""
    known[target.id] = number
    numbers = number if isinstance(number, tuple) else (number,)
    return target.id if numbers and all(type(n) in (int, float) for n in numbers) else ""


def drawn(setting: str) -> dict[str, dict[str, Any]]:
    """Returns thresholds: none, those of ``"low"``, of one module by its name, or, for a number, some that are drawn."""
    if setting == "none":
        return {}
    if setting in THRESHOLDS:
        return {setting: THRESHOLDS[setting]}
    if setting == "low":
        return THRESHOLDS
    draw = random.Random(int(setting))
    return {
        module: {name: _other(low, draw.choice([1, 1, 2, 3])) for name, low in names.items() if draw.random() < 0.5}
        for module, names in THRESHOLDS.items()
    }


def _other(low: Any, factor: int) -> Any:
    return low if isinstance(low, tuple) else low * factor


def lower(changed: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives constants of modules other values, before the library is imported: as if the source had them."""
    assert not any(name.startswith("shardtensor") for name in sys.modules)
    sys.meta_path.insert(0, _Finder(changed))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules whose constants are changed."""

    def __init__(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        self.changed = changed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self.changed.get(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec
        assert spec.origin
        spec.loader = _Loader(fullname, spec.origin, self.changed[fullname])
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with other constants; nothing of it is kept on disk."""

    def __init__(self, fullname: str, path: str, values: Mapping[str, Any]) -> None:
        super().__init__(fullname, path)
        self.values = values

    def get_code(self, fullname: str) -> types.CodeType:
        tree, left, known = ast.parse(self.get_data(self.path)), set(self.values), dict[str, Any]()
        for node in tree.body:
            if (name := _assigned(node, known)) in left and isinstance(node, ast.Assign | ast.AnnAssign):
                node.value = ast.copy_location(ast.Constant(self.values[name]), node)
                left.remove(name)
        assert not left, f"{fullname} has no {left}"
        return compile(tree, self.path, "exec", dont_inherit=True)
