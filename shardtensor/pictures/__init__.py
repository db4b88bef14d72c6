"""Pictures: which device holds which part of an array, which one sends how many bytes to which, and tensors as text.

The classes that are shown call these functions by `shardtensor.core.ABOVE`. Nothing is computed here but what is shown.
"""
