"""How bytes move and are counted: the log, transfers, the communicator and its collectives, memory kinds, simulation.

The main nouns are `Transfer` and `TransferLog` (the bytes that were moved), `TransferPlan` (the copies that a reshard
requires), `Communicator` (the collectives of a group of devices), `GatherPlan` (the transfers of elements selected by
index arrays) and `Schedule` (the messages that `simulate` prices). A call enters with tensors or with one array for
each device, and returns arrays on the devices.

`communicators` chooses between the communicator of one process and that of several. `between_processes` has what only a
job of several processes needs; an `Engine` (`engine_protocol`) transports its bytes.

Operators and interpreters must not be imported here.
"""
