"""How bytes move and are counted: the log, transfers, the communicator and its collectives, memory kinds, simulation.

The main nouns are `Transfer` and `TransferLog` (what was moved), `TransferPlan` (what has to move), `Communicator` (the
collectives of a group of devices), `GatherPlan` (elements picked by index arrays) and `Schedule` (the messages that
`simulate` prices). A call enters with tensors or with one array for each device, and leaves with arrays on the devices.

Operators and interpreters must not be imported here.
"""
