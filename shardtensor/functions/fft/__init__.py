"""Fourier transforms: the operators of `shardtensor.fft`, and the transforms of lines that are split over devices.

`transforms` declares the operators. Lines that are whole on a device are transformed there; lines that are split are
transformed by transpositions (`transpose_fft`) or, if their size has no suitable factors, by a convolution
(`chirp_fft`). Both multiply by `roots_of_unity`. A call enters by an operator of `transforms` and leaves through the
operators of one device; of the other functions, only the chapters of `functions.standard` may be imported here.
"""
