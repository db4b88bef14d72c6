"""Pure arithmetic of shardings: mesh, spec, split rule, rule language, index and view arithmetic, copy plans, pictures.

The main nouns are `Mesh`, `PartitionSpec`, `NamedSharding`, `Grid` (the shards of an array of a given shape), `Region`
(a box of a result and the operand elements that fill it) and `ViewSpec` (NumPy's view arithmetic without arrays).
Functions take shapes, specs and indices, and return shapes, boxes and integers.

No code here computes with arrays: neither tensors nor the namespaces of backends may be imported.
"""
