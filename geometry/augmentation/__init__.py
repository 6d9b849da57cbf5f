"""Random changes of meshes for training: transforms of operators, cuts and decimation."""
