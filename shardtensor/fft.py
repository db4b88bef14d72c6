"""The Fourier transform extension of the array API standard; `shardtensor.functions.fft.transforms` declares the
operators.

>>> st.fft.fft(st.asarray([1.0, 0.0, 0.0, 0.0])).tolist()
[(1+0j), (1+0j), (1+0j), (1+0j)]
"""

# ruff: noqa: I001 - `name as name` marks a public name for type checkers; one statement imports all of a module

import typing as _typing

from shardtensor.exports import exported as _exported
from shardtensor.functions.fft.transforms import (
    fft as fft,
    fft2 as fft2,
    fftfreq as fftfreq,
    fftn as fftn,
    fftshift as fftshift,
    hfft as hfft,
    ifft as ifft,
    ifft2 as ifft2,
    ifftn as ifftn,
    ifftshift as ifftshift,
    ihfft as ihfft,
    irfft as irfft,
    irfft2 as irfft2,
    irfftn as irfftn,
    rfft as rfft,
    rfft2 as rfft2,
    rfftfreq as rfftfreq,
    rfftn as rfftn,
)

if not _typing.TYPE_CHECKING:  # Type checkers take the names of the imports.
    __all__ = _exported(globals())

    def __dir__() -> list[str]:
        return __all__
