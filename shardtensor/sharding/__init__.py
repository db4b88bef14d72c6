"""Pure arithmetic of layouts: mesh, spec, split rule, rule language, index and view arithmetic, copy plans, pictures.

The main nouns are `Mesh`, `PartitionSpec`, `NamedSharding`, `Grid` (the shards that a sharding makes of a shape),
`Region` (a box of the result and where it comes from) and `ViewSpec` (the view arithmetic of NumPy, without arrays). A
call enters with shapes, specs and indices, and leaves with shapes, boxes and integers.

Nothing here touches an array: neither tensors nor the namespaces of backends may be imported.
"""
