"""What authors of engines use: `Engine`, the protocol of the plugins that transport bytes between processes.

An engine is a class that is registered in the entry-point group ``shardtensor.engines``. It has to pass the tests in
`shardtensor.testing.EngineTests`. docs/writing_an_engine.md shows one.
"""

from shardtensor.communication.engine_protocol import Bytes, Engine, LateError, Launch, LostError

__all__ = ["Bytes", "Engine", "LateError", "Launch", "LostError"]
