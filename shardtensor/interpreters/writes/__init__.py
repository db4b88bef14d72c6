"""Writes in place: ``x[i] = v``, ``x += y`` and ``out=``, built from pure operators.

The main noun is `WriteOp` (the operands and the kind of a write). A write enters in `writes`, which holds the lock of
the base from reading the old value to binding the new one; `write_transaction` copies, transfers and writes. Maps and
the scheduler must not be imported here.
"""
