"""The one error for meshes that can't be used."""


class MeshError(ValueError):
    """A mesh, or a file that should hold one, can't be used. The message says what is wrong and where."""
