"""`st.jit`: functions that are traced once for each combination of argument types, and then run as programs.

`program` has the programs as data, `trace` records them, `layouts` chooses where their values are, `replay` runs and
prices them, and `api` has the public functions.
"""
