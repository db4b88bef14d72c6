"""The host machine: cores, memory pool, threads, BLAS, signals, and blockwise loops over host arrays. Knows no device.

The main nouns are the memory pool (`memory_pool.empty` and its buffers), the thread pool (`threads.each`), the limit on
BLAS threads (`blas_threads.Limit`), the deferral of signal handlers (`signals.Interrupts`) and blockwise loops
(`blockwise.into`). The numpy backend and the interpreters call them with NumPy arrays and get NumPy arrays back.

The modules of this package import nothing else of shardtensor than `shardtensor.errors` and `shardtensor.core`.
"""
