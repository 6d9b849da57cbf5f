"""The window of `diffnet view --polyscope`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from diffnet.geometry import Mesh
from diffnet.geometry.elements.elements import on_triangles
from diffnet.geometry.errors import OptionError
from diffnet.train.tasks.task import Fields
from diffnet.viz.palette import colorize
from diffnet.viz.surface import default_view, make_surface, shown_points


def show_window(name: str, mesh: Mesh, fields: Sequence[Fields], vectors: Mapping[str, NDArray[Any]]) -> None:
    """Show a mesh or a point cloud with its values and with vectors (V, 3) at its vertices.

    Returns when the window is closed. Raises OptionError for values at edges, and if no window can be opened.
    """
    import polyscope  # an extra

    if any(field.at == "edges" for field in fields):
        raise OptionError("--polyscope shows values at vertices and faces, and the network predicts those of edges")
    try:
        polyscope.init()
    except RuntimeError as e:
        raise OptionError(f"--polyscope can't open a window ({e}); without it, a page is written") from e
    polyscope.set_up_dir(f"{default_view(shown_points(make_surface(mesh.verts, mesh.faces))).up}_up")
    is_cloud = mesh.is_point_cloud
    shape = (
        polyscope.register_point_cloud(name, mesh.verts)
        if is_cloud
        else polyscope.register_surface_mesh(name, mesh.verts, mesh.faces)
    )
    for field in reversed(fields):  # the one that is enabled last is shown
        place = {} if is_cloud else {"defined_on": field.at}
        for own, given in reversed(field.values.items()):
            values = on_triangles(mesh, given, field.at)
            if field.kind != "scalars":
                colors = values if field.kind == "colors" else colorize(values) / 255
                shape.add_color_quantity(own, colors, enabled=True, **place)
            else:
                shape.add_scalar_quantity(own, values, enabled=True, **place)
    for own, each in vectors.items():
        shape.add_vector_quantity(f"{own} (arrows)", each)
    polyscope.show()
