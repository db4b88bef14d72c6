"""The host machine: cores, memory pool, threads, BLAS, signals and blockwise loops over host arrays. It knows no
device.

The main nouns are the memory pool (`memory_pool.empty` and its buffers), the thread team (`threads.each`), the limit on
BLAS threads (`blas_threads.Limit`), interrupts that are held back (`signals.Interrupts`) and blockwise loops
(`blockwise.into`). The numpy backend and the interpreters call them with NumPy arrays and get NumPy arrays back.

Nothing but `shardtensor.errors` and `shardtensor.core` is imported here.
"""
