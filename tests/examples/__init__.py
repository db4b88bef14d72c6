"""Tests of the programs in docs/examples."""
