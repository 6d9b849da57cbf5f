"""A mesh or a point cloud in, `Operators` out."""

import lazy_loader

# Names are loaded when they are asked for, as __init__.pyi has them: PyTorch takes seconds, and processes that
# preprocess meshes do without.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
