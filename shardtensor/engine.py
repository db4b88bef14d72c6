"""What authors of engines use: `Engine`, the protocol of the plugins that transport bytes between processes.

An engine is a class that is registered in the entry-point group ``shardtensor.engines``. It has to pass the tests in
`shardtensor.testing.EngineTests`. docs/writing_an_engine.md shows one. `default_engine` returns the class of the
engine of a launcher, for engines that build on it.
"""

from shardtensor.communication.between_processes.launchers import default_engine
from shardtensor.communication.engine_protocol import (
    ArrivalError,
    Bytes,
    DeviceEngine,
    Engine,
    LateError,
    Launch,
    LostError,
)

__all__ = ["ArrivalError", "Bytes", "DeviceEngine", "Engine", "LateError", "Launch", "LostError", "default_engine"]
