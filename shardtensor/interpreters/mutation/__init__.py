"""NumPy's views and writes, built from pure operators.

The main nouns are the view (a base tensor and a `ViewSpec`), `WriteOp` (the operands and the kind of a write) and
`AdvancedIndex` (index arrays and masks). A read of a view enters in `views`, a read of one element in
`scalar_elements`. A write enters in `writes`, which holds the lock of the base from reading the old value to binding
the new one; `write_transaction` copies, transfers and writes.

Maps and the scheduler must not be imported here.
"""
