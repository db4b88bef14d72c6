"""Where arrays are: tensors made of arrays, transfers between devices and layouts, lists of shards, partial sums.

`conversion` makes tensors of arrays, scalars and nested lists. `transfers` declares `device_put`, `reshard` and
`device_get`, and `transfer_to`, by which all others transfer; `placed_functions` has functions that call `reshard` for
their arguments or results. `shard_lists` splits a tensor into a list with one item for each device, and `global_arrays`
has the tensors of several processes. `partial_sum_operators` adds or places unreduced results. `names` gives values
names for `remat`. A call enters by a public function and leaves through operators; interpreters must not be imported
here.
"""
