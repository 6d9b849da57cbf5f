"""Pictures and pages of meshes and point clouds, with labels, scalars, colors or vectors, and colored PLY files."""

import lazy_loader

# See __init__.pyi, and `diffnet.geometry` for why.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
