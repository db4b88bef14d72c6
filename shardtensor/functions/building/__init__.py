"""The parts of declarations and algorithms: monoids, data movements, halos, lines that are not split, and operators
that users do not call.
"""
