"""The processes of a job: how they start, agree on their calls, exchange arrays, and learn that one of them has died.

The main nouns are `JOB` (`processes`: the job of this process), `Agreement` (all processes make the same call, before
bytes are exchanged), `Rounds` (arrays as packets of limited size) and `Lifelines` (connections whose end shows that a
process was killed). `launchers` finds how this process was started, `difference` writes the error of processes whose
calls differ. `spanning_communicator` has the collectives of groups that span processes, `sums_across_processes` their
sums with the bits of one process, and `short_all_reduce` those of few bytes, prepared once.

A call enters by a communicator, a transfer or `processes.note`, and leaves through the engine of the job. Operators and
interpreters must not be imported here.
"""
