"""Maps: `pmap`, `shard_map`, `smap` and `map_overlap`; the launch of their programs, and their results."""
