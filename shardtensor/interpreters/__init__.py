"""What a call of an operator means: executed at once, executed on one device inside a map, or planned without elements.

`eager` is the default interpreter, `device` the one inside mapped functions, `abstract_device` the one inside mapped
functions that are simulated. `execution` infers, plans and runs one operator; `mutation` has views and writes. A call
enters through `shardtensor.core.bind` and leaves with tensors, or with the arrays of a backend.

Maps and the scheduler must not be imported here.
"""
