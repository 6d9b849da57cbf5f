"""From meshes to operators: `precompute` for one mesh, `precompute_all` for many, and the cache entries of both."""
