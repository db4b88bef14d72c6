"""The batching rules of the operators: one row for each, loaded by the first call of `vmap`.

The main noun is `Call` (one call on values of a batch, see `batching_forms`); a row is a function of it. The rows are
in `batching_rules` and, by subject, in `batched_indexing`, `batched_searching` and `batched_drawing`. A rule enters
from the batcher of `shardtensor.interpreters.batching`, or from the plan of a linear operator on partial sums, and
calls operators.

An operator that is composed of others needs no row: its operators have some. Rows call operators only: interpreters
must not be imported here.
"""

from shardtensor.functions.batching import batched_drawing as batched_drawing
from shardtensor.functions.batching import batched_indexing as batched_indexing
from shardtensor.functions.batching import batched_searching as batched_searching
from shardtensor.functions.batching import batching_rules as batching_rules
from shardtensor.functions.batching.batching_forms import Call as Call
from shardtensor.functions.batching.batching_forms import rule_of as rule_of
