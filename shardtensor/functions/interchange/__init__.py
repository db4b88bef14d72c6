"""Arrays of other libraries, and for them: DLPack in both directions.

`dlpack_import` makes tensors of arrays, without a copy where possible, and `dlpack_methods` has the operators behind
``__dlpack__``, for which `dlpack_export` hands out memory that the other library may write; `dlpack_memory` knows which
devices use a memory. A call enters by a public function or through `shardtensor.core.ABOVE` from a method of the
handle. Interpreters must not be imported here.
"""
