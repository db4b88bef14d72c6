"""The array functions, declared: one module for each chapter of the array API standard, and those of this library's
own.
"""
