"""CUDA graphs: launches of kernels that are captured once, and repeated as one launch."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.backend import lock
from shardtensor.errors import BackendError

_log = logging.getLogger("shardtensor")


class Graphs:
    """Captures launches on the current GPU.

    A capture happens on a stream of its own, since the library's stream is a blocking one: while such a stream
    captures, CUDA refuses work on the null stream, in every thread. Captured work does not run, so that the order
    with other streams is that of the launches of the graph.

    The mode is relaxed. In the other modes, CUDA refuses to allocate or free memory in the thread that captures, and
    ends the capture; but the garbage collector may free memory in it at any moment.

    Args:
        cupy: the module.

    Attributes:
        is_on: whether graphs are used, which the variable ``SHARDTENSOR_CUPY_GRAPHS`` determines.

    Raises:
        BackendError: the variable is neither ``auto`` nor ``off``.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._streams: dict[int, Any] = {}  # The stream of captures of each GPU; None where graphs do not work.
        self._lock = lock()  # Reentrant, since finalizers may call the library.
        self._is_capturing = False
        mode = os.environ.get("SHARDTENSOR_CUPY_GRAPHS", "auto")
        if mode not in ("auto", "off"):
            raise BackendError(f"SHARDTENSOR_CUPY_GRAPHS is {mode!r}; it must be auto or off")
        self.is_on = mode == "auto"

    def capture(self, launch: Callable[[], None]) -> Callable[[], None] | None:
        """Returns a function that launches on the current stream what ``launch`` launches, as a graph. None if graphs
        do not work on the current GPU, which a test finds out at the first use, if CUDA has refused this capture, or
        in a finalizer that runs during another capture.
        """
        gpu = self._cupy.cuda.runtime.getDevice()
        with self._lock:
            if self._is_capturing:
                return None
            self._is_capturing = True
            try:
                if gpu not in self._streams:
                    try:
                        self._streams[gpu] = self._tested(gpu)
                    except self._cupy.cuda.memory.OutOfMemoryError:
                        return None  # The result is not stored, so that the test is repeated when there is memory.
                stream = self._streams[gpu]
                return None if stream is None else self._captured(stream, launch)
            finally:
                self._is_capturing = False

    def _captured(self, stream: Any, launch: Callable[[], None]) -> Callable[[], None] | None:
        current = self._cupy.cuda.get_current_stream()
        stream.use()
        try:
            try:
                stream.begin_capture(self._cupy.cuda.runtime.streamCaptureModeRelaxed)
                launch()
            except BaseException:  # Raised again, after the stream has stopped capturing.
                with contextlib.suppress(RuntimeError):  # An invalid capture ends with an error, too.
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        except RuntimeError as error:  # CUDA's errors, and CuPy's refusals.
            _log.info("launches were not captured in a CUDA graph: %s", error)
            return None
        finally:
            current.use()
        run: Callable[[], None] = graph.launch
        return run

    def _tested(self, gpu: int) -> Any:
        """Returns a stream on which a test capture has run nothing, and whose graph computes what its kernels do;
        otherwise None.
        """
        cupy = self._cupy
        kernel = cupy.ElementwiseKernel(
            "int32 x, int32 n", "int32 y", "y = 3 * x + n", "shardtensor_graph_test", no_return=True
        )
        x, y, z = cupy.zeros(1024, np.int32), cupy.zeros(1024, np.int32), cupy.zeros(1024, np.int32)

        def launch() -> None:
            kernel(x, 7, y)
            kernel(y, 1, z)

        launch()  # A kernel is compiled and loaded before it is captured.
        z.fill(0)
        cupy.cuda.get_current_stream().synchronize()  # Work that a capture runs at once would be seen in z.
        stream = cupy.cuda.Stream(non_blocking=True)
        run = self._captured(stream, launch)
        maxima = [int(cupy.asnumpy(z).max())]
        if run is not None:
            numbers = np.arange(1024, dtype=np.int32)
            x += cupy.asarray(numbers)
            run()
            if maxima == [0] and np.array_equal(cupy.asnumpy(z), 9 * numbers + 22):
                return stream
        _log.warning("GPU %d: a test of CUDA graphs has failed; kernels are launched one by one", gpu)
        return None
