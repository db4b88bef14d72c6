"""One function on many devices: pmap, shard_map, smap, named axes, collectives, and the scheduler that runs them.

The main nouns are `Program` (one call of a mapped function), `MapRun` (the programs of one map), `Scheduler` (runs the
programs of nested maps on few threads), `CollectiveCall` (what all programs of a collective must agree in) and
`rendezvous` (the programs that wait for each other in one collective). `maps` has the maps, `scheduling` the scheduler.
Beside them are the collectives (`collectives`, on named `axes`, and `ragged_exchange`, whose messages follow from
elements), and what they and maps do on a tape or in a batch (`derivatives`, `map_gradients`, `map_batching`, and
`recorded` for arrays whose library records gradients).

A call enters through a map, runs the function once for each device, and leaves with a list of tensors or one tensor.
The lower packages must not import this one; only the public names and the tools above them do.
"""
