"""Pictures: which device holds which part of an array, which one sends how many bytes to which, and tensors as text.

The main noun is `Part` (`parts`: a part of an array, its place, its label and its color). `visualize` shows layouts as
text, `html` as SVG, `traffic_picture` shows the bytes between devices, and `display` the elements, for ``str`` and
``repr``. The classes that are shown call these functions by `shardtensor.core.ABOVE`.

Nothing is computed here but what is shown, and interpreters and maps must not be imported.
"""
