"""Data sets: generated ones, data sets on disk, and packed batches of preprocessed samples.

The names in `__all__` are public.
"""

import lazy_loader

# See __init__.pyi, and `diffnet.geometry` for why.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
