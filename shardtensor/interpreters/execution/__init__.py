"""Infers the layout of one pure operator, plans it once for its operands' avals, and runs the plan.

The main nouns are `Plan` (printable and comparable data, and the function that runs it), the cache of plans
(`plan_cache.planned`), the planner (`planning`), the strategies (whole buffer, shard by shard, partial results) and the
reduction in blocks on host memory. A call enters with an operator, its operands and its parameters, and returns a
tensor.

Views and writes must not be imported here: they are built from pure operators.
"""
