"""The error for meshes that can't be used."""

from diffnet.geometry.errors import DiffnetError


class MeshError(DiffnetError, ValueError):
    """A mesh, or a file that should hold one, can't be used. The message says what is wrong and where."""
