"""Arrays of other libraries and of files: DLPack in both directions, and the formats .npy and .npz."""
