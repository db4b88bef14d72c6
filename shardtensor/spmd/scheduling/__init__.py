"""The scheduler: the programs of maps on few threads, which are suspended while they wait for each other."""
