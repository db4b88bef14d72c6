"""Infers the layout of one pure operator, plans it once for its operands' avals, and runs the plan.

The main nouns are the plan cache (`plan_cache.run`), the planner (`planning`), the strategies that execute a plan
(whole buffer, shard by shard, partial results) and the reduction in blocks on host memory. A call enters with an
operator, its operands and its parameters, and returns a tensor.

Views and writes must not be imported here: they are built from pure operators.
"""
