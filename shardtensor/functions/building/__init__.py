"""The parts that declarations and algorithms use. No module here declares an operator that users call.

The main nouns are `Monoid` (combines the partial results of shards), `DataMovement` (the regions of a result and their
sources) and the halo (elements of neighboring shards). `own_kernels` calls functions that only some libraries have,
`python_numbers` Python's functions for scalars. `scatter`, `split_search`, `special` and `unsplit_lines` declare
operators of which other operators are composed. Interpreters must not be imported here.
"""
