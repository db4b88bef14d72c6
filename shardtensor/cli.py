"""The command line: ``shardtensor demo`` shows the library at work, ``shardtensor info`` what it has."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardtensor.backend.protocol import Backend, requested_devices
from shardtensor.backend.registry import backend_names, default_backend, load
from shardtensor.errors import ArgumentError, BackendError

if TYPE_CHECKING:
    from rich.table import Table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments; without it, those that the process was started with.

    Returns:
        The exit status: 0; 1 where a check of the demo fails, or where devices cannot be used, which one line
        on the standard error explains; 2 without a command.

    Raises:
        SystemExit: from argparse: of status 2 for what it does not understand, 0 for help and version.
    """
    parser = _parser()
    options = vars(parser.parse_args(argv))
    command = options.pop("command")
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with _any_text_printable():
            return _demo(**options) if command == "demo" else _info()
    except (ArgumentError, BackendError) as error:
        print(f"shardtensor: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    about = importlib.metadata.metadata("shardtensor")
    parser = argparse.ArgumentParser("shardtensor", description=about["Summary"])
    parser.add_argument("--version", action="version", version=f"shardtensor {about['Version']}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="learn handwritten digits on all devices, and check it against NumPy",
        argument_default=argparse.SUPPRESS,  # what is not given is the demo's own default
    )
    demo.add_argument("--devices", type=int, metavar="N", help="how many (default: all; logical ones: 8)")
    demo.add_argument("--backend", metavar="NAME", help="whose devices (default: the default backend's)")
    demo.add_argument("--steps", type=int, metavar="N", help="how many steps to train (default: enough)")
    commands.add_parser("info", help="list backends and their devices, and say why one cannot be used")
    return parser


@contextlib.contextmanager
def _any_text_printable() -> Iterator[None]:
    """Lets characters that the standard output cannot encode (on Windows, to a file) come out as ``?``."""
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
    from shardtensor import demo

    return 0 if demo.main(**options).passed else 1


def _info() -> int:
    from rich.console import Console

    requested_devices()  # a wrong number is one error, and not one for each backend
    problem: Exception | None = None
    try:
        default = default_backend().name
    except (ArgumentError, BackendError) as error:  # shown after the table, which may say more
        default, problem = "", error
    Console().print(_backend_table(default))
    if problem:
        raise problem
    return 0


def _backend_table(default: str) -> Table:
    """Every installed backend, and what it has or why it cannot be used."""
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "default", "devices", "kind", "free / total memory, or why absent")
    for name in backend_names():
        try:
            cells = _describe(load(name))
        except BackendError as error:
            cells = ["none", "", str(error)]
        table.add_row(*map(Text, (name, "yes" if name == default else "", *cells)))
    return table


def _describe(backend: Backend) -> list[str]:
    """How many devices it has, their kind, and their memory. What several have in common is said once."""
    devices = backend.devices()
    kinds = dict.fromkeys(device.kind for device in devices)
    memory = dict.fromkeys(backend.memory_info(device) for device in devices)
    sizes = [f"{_size(free)} / {_size(total)}" for free, total in filter(None, memory)]
    return [str(len(devices)), "\n".join(kinds), "\n".join(sizes)]


def _size(count: int) -> str:
    """A number of bytes for people.

    >>> from shardtensor.cli import _size
    >>> _size(80 << 30), _size(512 << 20)
    ('80.0 GiB', '0.5 GiB')
    """
    return f"{count / 2**30:.1f} GiB"
