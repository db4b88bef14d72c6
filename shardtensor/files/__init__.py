"""Files: formats, their checks, and writes that are durable and whole. Knows host arrays, boxes and paths, no tensors.

The main nouns are the *box* (a pair of begin and end for each dimension), the *outer chunk* of an array, which is one
file and has one owner, and its *inner chunks*, each of which is read alone and has a checksum.
`chunk_grids.plan_grid` says which owner writes which outer chunk from which pieces; `zarr.write_chunk` writes one,
`zarr.ZarrArray.read` reads any box, by several threads (`box_reader`) and by C (`row_reads`); `atomic.commit_folder`
makes a folder visible as a whole. Every file that is read is taken for hostile: its sizes are compared with those of
the file before memory is allocated for them, and links in its folder are not followed.

The layers above pass host arrays and get host arrays back. Nothing here is imported before one of these is used, and
nothing imports tensors, meshes or engines.
"""
