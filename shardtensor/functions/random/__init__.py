"""Random numbers: the functions of `shardtensor.random`, the operators that draw, and Philox on hosts and GPUs."""
