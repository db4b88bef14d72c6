"""One function on many devices: pmap, shard_map, smap, named axes, collectives, and the scheduler that runs them.

The main nouns are `Program` (one call of a mapped function), `MapRun` (the programs of one map), `Scheduler` (which
runs programs on few threads) and `Rendezvous` (programs that wait for each other in a collective). A call enters
through a map, runs the function once for each device, and leaves with a list of tensors or one tensor.

Nothing below this package may import it; only the public names stand above it.
"""
