"""Writes in place: ``x[i] = v``, ``x += y`` and ``out=``, built from pure operators.

The main nouns are `WriteOp` (the operands and the kind of a write) and `WriteTransaction`. A write enters in `writes`,
which holds the lock of the base from reading the old value to binding the new one. `write_ops` computes the new
elements, and `scattered_on_device` those of index arrays on a GPU. `write_transaction` decides whether the memory is
written in place: it copies the buffers that others hold, transfers operands, and then writes.

Of the interpreters, only `execution` and `views` may be imported here.
"""
