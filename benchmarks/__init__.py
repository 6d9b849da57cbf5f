"""Speed and memory against peers: a registry of benchmarks, run by `python -m diffnet.benchmarks` in a checkout.

The names in `__all__` are public.
"""

import lazy_loader

# __init__.pyi lists the public names. `BENCHMARKS` imports every benchmark when it is first used, because importing
# PyTorch takes seconds and a list of the benchmarks doesn't need it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
