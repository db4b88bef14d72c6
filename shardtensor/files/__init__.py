"""Files: formats, their checks, and writes that are durable and whole.

The main nouns are the *box* (a pair of begin and end for each dimension), the *outer chunk* of an array, which is one
file and has one owner, and its *inner chunks*, each of which is read alone and has a checksum.
`chunk_grids.plan_grid` says which owner writes which outer chunk from which pieces; `zarr.write_chunk` writes one,
`zarr.ZarrArray.read` reads any box, by several threads (`box_reader`) and by C (`row_reads`); `atomic.commit_folder`
makes a folder visible as a whole. Every file that is read is taken for hostile: its sizes are compared with those of
the file before memory is allocated for them, and links in its folder are not followed.

`npy_files` has the formats .npy and .npz, and `byte_ranges` the bytes that a box has in a file with one array. All of
these get host arrays and return host arrays, and import no handles of tensors, meshes or engines.

Five modules know tensors: `array_files` (`shardtensor.save`, `shardtensor.load` and their relatives),
`safetensors_files` and `zarr_folders` are what users call, also through `shardtensor.core.ABOVE` from ``x.tofile``;
`tensor_reads` makes a tensor of a file, of which each process reads what its devices hold; and `joint_writes` writes a
tensor that no process has as a whole. Nothing here is imported before one of these is used.
"""
