"""NumPy's views, and reads by indices: of single elements, by arrays of integers and by masks.

The main nouns are `View` (the storage of a tensor that is a base and a `ViewSpec`), `ScalarElement` (an element that
stays on its device until it is read) and `AdvancedIndex` (index arrays and masks, in canonical form). A read of a view
enters in `views`, that of one element in `scalar_elements`, and that by index arrays in `advanced_indexing`, which
takes them from `index_entries` or, if they are on the GPU of the tensor, from `device_indices`.

Of the interpreters, only those of `execution` may be imported here.
"""
