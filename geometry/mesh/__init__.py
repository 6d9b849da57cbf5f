"""Reading, checking and normalizing meshes."""
