"""Distributed algorithms: functions of the local arrays of a tensor (`shards.Shards`) and of a communicator.

To write one, declare the operator in a chapter of the array API, and decorate a function with
``distributed(operator)``. It receives the `Shards` of the operand, a `MeshCommunicator`, and the operator's parameters,
and returns the `Shards` of the result::

    @distributed(cumulative_sum)
    def scan(x: Shards, along: Callable[..., MeshCommunicator], *, axis: int, dtype: Any) -> Shards: ...

* ``x.map(kernel)`` calls ``kernel(xp, array)`` for the local array of each device, with the namespace of its backend.
* ``along(dimension)`` returns the communicator along the mesh axes that split a dimension. It has the collectives of
  `shardtensor.communication.communicator.Communicator`, on one local array for each device of the mesh, and ``index``,
  the position of each device along these axes.

The function has no branches for shared or separate memories, for simulated devices or for inference: the shards and the
communicator know where arrays are, what is recorded, and whether there are elements. Where one device can compute the
result with the same bits, ``distributed(operator, whole=...)`` states how: it then does so wherever devices share a
memory, and for operands of few bytes (see `first_device`, which decides this for all operators).

An operator with several results that each device computes from its own part, such as a decomposition of matrices, needs
no communicator: see `several_results`.

Interpreters must not be imported here.
"""
