"""Files: formats, their checks, and writes that are durable and whole.

The main nouns are the *box* (a pair of begin and end for each dimension), the *outer chunk* of an array, which is one
file and has one owner, and its *inner chunks*, each of which is read alone and has a checksum.
`chunk_grids.plan_grid` says which owner writes which outer chunk from which pieces; `zarr.write_chunk` writes one,
`zarr.ZarrArray.read` reads any box; `atomic.commit_folder` makes a folder visible as a whole. Every file that is read
is taken for hostile: its sizes are compared with those of the file before memory is allocated for them, and links in
its folder are not followed.

`npy_files` has the formats .npy and .npz. `array_files` is the only module here that knows tensors: its functions are
`shardtensor.save`, `shardtensor.load` and their relatives, and a call enters by these, or through
`shardtensor.core.ABOVE` from ``x.tofile``. The others get host arrays and return host arrays. Nothing here is imported
before one of these is used, and no other module here imports handles of tensors, meshes or engines.
"""
