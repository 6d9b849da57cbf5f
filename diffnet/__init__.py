"""Learning on surfaces with DiffusionNet (Sharp et al. 2022, https://arxiv.org/abs/2012.00888)."""

from pathlib import Path

# In a wheel the rooms (ops, geometry, data, train) lie inside this folder. In a checkout they stand beside it,
# so that, and only that, layout adds the checkout's root to the places where subpackages are looked for.
_root = Path(__file__).resolve().parent.parent
if not (_root / "diffnet" / "ops").exists() and (_root / "ops" / "__init__.py").is_file():
    __path__.append(str(_root))
del Path, _root
