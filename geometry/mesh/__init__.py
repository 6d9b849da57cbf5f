"""Reading, checking and normalizing meshes and point clouds."""
