"""Where arrays are: tensors made from arrays, transfers between devices and layouts, lists of shards, partial sums."""
