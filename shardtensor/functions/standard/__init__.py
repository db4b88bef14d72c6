"""The chapters of the array API standard: declarations of its functions, one module for each chapter.

Some chapters are divided: `repetition` and `joining` belong to manipulation, `take_along` to indexing, and `scans` to
the statistical and utility functions. The main noun is the declared operator, with its rule, its monoid and what is
attached to it. A call enters by the function that the declaration returns, and leaves through `shardtensor.core.bind`;
compositions call other operators.

NumPy's functions beyond the standard are in `functions.numpy` and `functions.statistics`. A chapter that `public`
imports as a whole defines operators only. Interpreters must not be imported here.
"""
