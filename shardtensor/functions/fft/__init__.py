"""Fourier transforms: the operators of `shardtensor.fft`, and the transforms of lines that are split over devices."""
