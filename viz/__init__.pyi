from .pages import Page as Page, page as page
from .palette import COLOR_MAPS as COLOR_MAPS, UNLABELED_COLOR as UNLABELED_COLOR, label_colors as label_colors
from .pictures import Picture as Picture, picture as picture
from .ply import write_ply as write_ply
from .surface import View as View
