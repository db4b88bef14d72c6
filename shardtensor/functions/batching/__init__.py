"""The batching rules of the operators: one row for each, loaded by the first call of `vmap`.

An operator that is composed of others needs no row: its operators have some. Rows call operators only, and know no
interpreters.
"""

from shardtensor.functions.batching import drawing as drawing
from shardtensor.functions.batching import indexing as indexing
from shardtensor.functions.batching import rules as rules
from shardtensor.functions.batching import searching as searching
from shardtensor.functions.batching.forms import Call as Call
from shardtensor.functions.batching.forms import rule_of as rule_of
