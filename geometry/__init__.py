"""From a mesh or a point cloud to `Operators`. The names in `__all__` are public."""

import lazy_loader

# __init__.pyi lists the public names. Each is imported when it is first used, because importing PyTorch takes seconds
# and processes that preprocess meshes don't need it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
