"""NumPy's views, and reads by indices: of single elements, by arrays of integers and by masks.

The main nouns are the view (a base tensor and a `ViewSpec`) and `AdvancedIndex` (index arrays and masks). A read of a
view enters in `views`, a read of one element in `scalar_elements`. Maps and the scheduler must not be imported here.
"""
