"""Training and prediction as the command line does it.

The names in `__all__` are public. `DiffusionNet.load` reads the checkpoints of a run.
"""

import lazy_loader

# See __init__.pyi, and `diffnet.geometry` for why.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
