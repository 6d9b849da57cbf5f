from .pages import Page, page
from .palette import COLOR_MAPS, UNLABELED_COLOR, label_colors
from .pictures import Picture, picture
from .ply import write_ply
from .view import View

__all__ = [
    "COLOR_MAPS",
    "UNLABELED_COLOR",
    "Page",
    "Picture",
    "View",
    "label_colors",
    "page",
    "picture",
    "write_ply",
]
