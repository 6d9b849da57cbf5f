"""Learning on surfaces with DiffusionNet (Sharp et al. 2022, https://arxiv.org/abs/2012.00888).

Public are the names in `__all__` of this package and of its subpackages, which `import diffnet` makes available:

- `diffnet.ops`: differentiable functions on tensors. (`Operators`, the matrices and the basis of a mesh, is a class.)
- `diffnet.geometry`: from a mesh or a point cloud to `Operators`.
- `diffnet.data`: labeled data sets, samples and batches. `diffnet.data.pyg` is for PyTorch Geometric; import it.
- `diffnet.train`: training and prediction as the command line does it.
- `diffnet.viz`: pictures and pages of meshes.

All other names and modules can change in any version. Each is imported when it is first used.
"""

from diffnet.interrupts import ExitAtCtrlC as _ExitAtCtrlC, is_command as _is_command

with _ExitAtCtrlC(_is_command()):
    from pathlib import Path as _Path

    import lazy_loader as _lazy_loader

    # In a wheel the rooms (ops, geometry, data, train) lie inside this folder. In a checkout they stand beside it.
    _here = _Path(__file__).resolve().parent
    if not (_here / "ops" / "__init__.py").is_file() and (_here.parent / "ops" / "__init__.py").is_file():
        from diffnet.checkout import rooms_beside as _rooms_beside

        __path__.append(_rooms_beside(_here))

    # See __init__.pyi, and `diffnet.geometry` for why.
    __getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)

__version__ = "1.0.0"
