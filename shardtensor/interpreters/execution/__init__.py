"""Infers the layout of one pure operator, plans it once for its operands' avals, and runs the plan.

The main nouns are `Plan` (printable and comparable data, and the function that runs it), the cache of plans
(`plan_cache.planned`), the planner (`planning`), the strategies (whole buffer, shard by shard, partial results) and the
reduction in blocks on host memory. `rule_plan` decides where operands must be, and `product_layouts` which layout a
product gets. A call enters with an operator, its operands and its parameters, and returns a tensor.

No other interpreter may be imported here: views and writes are built from pure operators.
"""
