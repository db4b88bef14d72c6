"""Rewrites of programs that transfer fewer bytes (see `shardtensor.interpreters.programs.passes`)."""
