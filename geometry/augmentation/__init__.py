"""Changes of meshes: transforms of operators, cuts and decimation."""
