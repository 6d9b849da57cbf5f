"""The error for meshes that can't be used."""

from diffnet.geometry.errors import DiffnetError


class MeshError(DiffnetError, ValueError):
    """A mesh or a mesh file can't be used. The message names it and says what is wrong."""
