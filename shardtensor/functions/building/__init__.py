"""What declarations and algorithms are made of: monoids, data movements, halos, lines that are not split, and operators
that users do not call.
"""
