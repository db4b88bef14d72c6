"""What authors of engines use: `Engine`, the protocol of the plugins that transport bytes between processes.

An engine is a class that is registered in the entry-point group ``shardtensor.engines``. It has to pass the tests in
`shardtensor.testing.EngineTests`. docs/writing_an_engine.md shows one. `load_engine` returns the class of an engine by
its name, for engines that build on another one.
"""

from shardtensor.communication.between_processes.launchers import load_engine
from shardtensor.communication.engine_protocol import Bytes, Engine, LateError, Launch, LostError

__all__ = ["Bytes", "Engine", "LateError", "Launch", "LostError", "load_engine"]
