"""How bytes move and are counted: the log, transfers, the communicator and its collectives, memory kinds, simulation.

The main nouns are `Transfer` and `TransferLog` (the bytes that were moved), `TransferPlan` (the copies that a reshard
requires), `Communicator` (the collectives of a group of devices), `GatherPlan` (the transfers of elements selected by
index arrays) and `Schedule` (the messages that `simulate` prices). A call enters with tensors or with one array for
each device, and returns arrays on the devices.

Operators and interpreters must not be imported here.
"""
