"""NumPy's views and writes, made of pure operators.

The main nouns are the view (a base tensor and a `ViewSpec`), `WriteOp` (what is written and how) and
`AdvancedIndex` (index arrays and masks). A read of a view enters in `views`, a write in `writes`, which holds the lock
of the base from reading the old value to binding the new one.

Maps and the scheduler must not be imported here.
"""
