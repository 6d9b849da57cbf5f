from .color_maps import COLOR_MAPS
from .pages import Page, page
from .palette import UNLABELED_COLOR, label_colors
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
