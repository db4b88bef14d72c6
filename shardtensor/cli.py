"""The command line: ``shardtensor demo`` runs the demo, ``shardtensor info`` lists the backends and their devices,
``shardtensor launch`` starts the processes of a job on this host, and ``shardtensor checkpoint`` shows and verifies
checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardtensor.backend.protocol import Backend, requested_devices
from shardtensor.backend.registry import backend_names, default_backend, load
from shardtensor.errors import ArgumentError, ArgumentTypeError, BackendError
from shardtensor.host.memory_pool import cache_info
from shardtensor.host.units import counted, readable

if TYPE_CHECKING:
    from rich.console import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the command-line arguments (default: those of the process).

    Returns:
        The exit status: 0 on success; 1 if a check of the demo fails or devices cannot be used, in which case one line
        on standard error explains why; 2 if no command is given; that of the first process that fails for a job; 130
        after Ctrl-C, and 141 if nothing reads the output.

    Raises:
        SystemExit: raised by argparse, with status 2 for invalid arguments and 0 for ``--help`` and ``--version``.
    """
    parser = _parser()
    options = vars(parser.parse_args(argv))
    command = options.pop("command")
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with _any_text_printable():
            status = _COMMANDS[command](**options)
            if sys.stdout is not None:
                sys.stdout.flush()
            return status
    except (ArgumentError, ArgumentTypeError, BackendError) as error:
        print(f"shardtensor: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `shardtensor … | head -1`: nothing reads the rest.
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _drop_output()
        print(f"shardtensor: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    about = importlib.metadata.metadata("shardtensor")
    parser = argparse.ArgumentParser("shardtensor", description=about["Summary"])
    parser.add_argument("--version", action="version", version=f"shardtensor {about['Version']}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a classifier of handwritten digits on all devices, and compare it with NumPy",
        argument_default=argparse.SUPPRESS,  # Omitted options take the defaults of `demo.main`.
    )
    demo.add_argument(
        "--devices", type=int, metavar="N", help="the number of devices (default: all, or 8 logical devices)"
    )
    demo.add_argument("--backend", metavar="NAME", help="the backend of the devices (default: the default backend)")
    demo.add_argument("--steps", type=int, metavar="N", help="the number of training steps (default: 150)")
    commands.add_parser(
        "info", help="list the backends and their devices, and the reasons why backends are not available"
    )
    checkpoint = commands.add_parser("checkpoint", help="list what a checkpoint has, or compare all its checksums")
    checkpoint.add_argument("action", choices=("inspect", "verify"))
    checkpoint.add_argument("path", help="the folder of the checkpoint")
    launch = commands.add_parser("launch", help="run a program in several processes of this host")
    launch.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="the number of processes")
    launch.add_argument(
        "--engine", choices=("mpi", "gloo"), help="what connects them (default: mpi if it is installed)"
    )
    launch.add_argument("--timeout", type=float, metavar="S", help="end all processes after so many seconds")
    launch.add_argument("program", help="a Python file, or an executable")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the program")
    return parser


def _drop_output() -> None:
    """Connects standard output to nothing if it cannot be written: Python would raise the error again at its end."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def _any_text_printable() -> Iterator[None]:
    """Replaces characters that standard output cannot encode (on Windows, if redirected to a file) by ``?``."""
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        yield
        return
    errors = out.errors
    out.reconfigure(errors="replace")
    try:
        yield
    finally:
        out.reconfigure(errors=errors)


def _demo(**options: Any) -> int:
    from shardtensor import demo  # Only this command needs it.

    return 0 if demo.main(**options).passed else 1


def _checkpoint(action: str, path: str) -> int:
    from shardtensor.checkpoint import inspect, verify  # Only this command needs it.

    if action == "inspect":
        print(inspect(path))
    else:
        verify(path)
        info = inspect(path)
        print(f"{info.path}: {counted(len(info.leaves), 'leaf', 'leaves')}, {readable(info.stored)}: no damage")
    return 0


def _launch(processes: int, engine: str | None, timeout: float | None, program: str, arguments: list[str]) -> int:
    from shardtensor.launcher import launch  # Only this command needs it.

    if program.endswith(".py") and not os.path.isfile(program):
        raise ArgumentError(f"launch: there is no file {program!r}")
    command = [sys.executable, program] if program.endswith(".py") else [program]
    return launch([*command, *arguments], processes, engine, timeout=timeout, output=_print_line)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _info() -> int:
    from rich.console import Console  # Only this command prints a table.

    requested_devices()  # An invalid number is reported once, and not for each backend.
    problem: Exception | None = None
    try:
        default = default_backend().name
    except (ArgumentError, BackendError) as error:  # The error is shown after the table, which may explain it.
        default, problem = "", error
    _print_backends(Console(), {name: _described(name) for name in backend_names()}, default)
    if problem:
        raise problem
    return 0


Description = tuple[str, str, str]
"""Of a backend: the number of its devices, their kinds, and their memory; or why they cannot be used."""


def _print_backends(console: Console, backends: Mapping[str, Description], default: str) -> None:
    """Prints a table of the backends, or a list where the table does not fit, and the limit of the memory cache."""
    from rich.measure import Measurement  # Only this command prints a table.
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "default", "devices", "kind", "free / total memory, or why unavailable")
    for name, description in backends.items():
        table.add_row(*map(Text, (name, "yes" if name == default else "", *description)))
    unlimited = console.options.update_width(10_000)
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table)
    else:  # The table would break words.
        for name, (count, kinds, memory) in backends.items():
            console.print(Text(f"{name} (default)" if name == default else name, style="bold"))
            about = [
                f"devices: {count} {kinds}".rstrip(),
                memory and f"free / total memory: {memory}" if kinds else memory,
            ]
            console.print(Padding(Text("\n".join(filter(None, about))), (0, 0, 0, 2)))
    limit = readable(cache_info().limit)
    console.print(
        Text(
            f"The memory of deleted host arrays is kept for later results: up to {limit}, by default a quarter of the "
            "memory that this process may use. st.free_cache() frees it, and st.set_cache_limit sets the maximum."
        )
    )


def _described(name: str) -> Description:
    """Returns the number of devices, their kinds and their memory; instead of the memory, why they cannot be used."""
    try:
        return _describe(load(name))
    except BackendError as error:
        return "none", "", str(error)


def _describe(backend: Backend) -> Description:
    """Returns the number, the kinds and the memory of a backend's devices; equal entries are listed once."""
    devices = backend.devices()
    kinds = dict.fromkeys(device.kind for device in devices)
    memory = dict.fromkeys(backend.memory_info(device) for device in devices)
    sizes = [f"{readable(free)} / {readable(total)}" for free, total in filter(None, memory)]
    return str(len(devices)), "\n".join(kinds), "\n".join(sizes)


_COMMANDS: Mapping[str, Callable[..., int]] = {
    "checkpoint": _checkpoint, "demo": _demo, "info": _info, "launch": _launch
}  # fmt: skip
