"""Learning on surfaces with DiffusionNet (Sharp et al. 2022, https://arxiv.org/abs/2012.00888)."""

from diffnet.interrupts import ExitAtCtrlC as _ExitAtCtrlC
from diffnet.interrupts import is_command as _is_command

with _ExitAtCtrlC(_is_command()):
    from pathlib import Path as _Path

    import lazy_loader as _lazy_loader

    # In a wheel the rooms (ops, geometry, data, train) lie inside this folder. In a checkout they stand beside it, and
    # then, and only then, the checkout's root joins the places where subpackages are looked for.
    _here = _Path(__file__).resolve().parent
    if not (_here / "ops" / "__init__.py").is_file() and (_here.parent / "ops" / "__init__.py").is_file():
        __path__.append(str(_here.parent))

    # See __init__.pyi, and `diffnet.geometry` for why.
    __getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
