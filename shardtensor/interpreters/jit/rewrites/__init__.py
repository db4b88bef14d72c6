"""Rewrites of programs: the passes that `jit` adds to `shardtensor.interpreters.programs.passes.PASSES`, in this order.

A pass is a function of a program and a `Setting` that returns a program of the same results. One that only saves
transfers is declared by `saving_transfers`; any other runs on every memory. Kernels and the languages that run them
must not be imported here.
"""

from shardtensor.interpreters.jit.grouping.stencil_writes import with_stencils
from shardtensor.interpreters.jit.rewrites.common_sums import with_common_sums
from shardtensor.interpreters.jit.rewrites.common_transfers import with_common_transfers
from shardtensor.interpreters.jit.rewrites.copies import without_copies
from shardtensor.interpreters.jit.rewrites.deferred_sums import with_deferred_sums
from shardtensor.interpreters.jit.rewrites.scattered_sums import with_scattered_sums
from shardtensor.interpreters.programs.passes import PASSES, saving_transfers

PASSES += [
    ("copies", without_copies),
    ("scattered sums", saving_transfers(with_scattered_sums)),
    ("deferred sums", with_deferred_sums),
    ("stencils", saving_transfers(with_stencils)),
    ("common transfers", saving_transfers(with_common_transfers)),
    ("common sums", saving_transfers(with_common_sums)),
]
