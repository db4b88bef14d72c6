"""Maps: `pmap`, `shard_map`, `smap` and `map_overlap`; the launch of their programs, and their results.

The main nouns are the map, which prepares arguments and names axes, the call (`nesting.Call`: its devices and its
position) and the output. Each kind of map has a module (`map_overlap` is in `stencils`); all run their calls by
`launch`, which the scheduler executes, and join results by `outputs`. `nesting` has maps in maps, `captured` what
processes compare of a function, and `maps_across_processes` maps of which each process runs a part. `shard_jit` is no
map: it joins lists of shards as the results of maps, calls a compiled function once, and splits what this returns.

A call enters by a public function and leaves with tensors. Tapes and batchers must not be imported here: what maps do
on them is in `map_gradients` and `map_batching`, above.
"""
