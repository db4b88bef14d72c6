"""The interpreters: an operator call is executed eagerly, executed on one device of a map, or planned without elements.

`eager` is the default interpreter, `device` the interpreter inside mapped functions, and `abstract_device` the
interpreter inside simulated mapped functions. `execution` infers, plans and runs one operator; `mutation` implements
views and writes. A call enters through `shardtensor.core.bind` and returns tensors or arrays of a backend.

Maps and the scheduler must not be imported here.
"""
