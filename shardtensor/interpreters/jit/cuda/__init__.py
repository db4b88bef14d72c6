"""Kernels in CUDA, and graphs of their launches."""
