"""The batching rules of the operators: one row for each, loaded by the first call of `vmap`.

An operator that is composed of others needs no row: its operators have some. Rows call operators only, and know no
interpreters.
"""

from shardtensor.functions.batching import batched_drawing as batched_drawing
from shardtensor.functions.batching import batched_indexing as batched_indexing
from shardtensor.functions.batching import batched_searching as batched_searching
from shardtensor.functions.batching import batching_rules as batching_rules
from shardtensor.functions.batching.batching_forms import Call as Call
from shardtensor.functions.batching.batching_forms import rule_of as rule_of
