"""Random numbers: the functions of `shardtensor.random`, the operators that draw, and Philox on hosts and GPUs.

The main nouns are `Key` (`random_keys`) and the words: random bits of an element, which follow from the key and its
global index only. `samplers` has the public functions, which check their arguments and call the operators of
`distributions` and `discrete_distributions`. `random_elements` draws the words of the elements of a shard,
`numbers_of_words` makes numbers of them, `random_kernel` does both on a GPU by one kernel, and `random_examples` draws
those of many keys, for `vmap`. A call enters by a function of `samplers` and leaves through operators. Interpreters
must not be imported here.
"""
