"""The arguments that `picture` and `page` share: shapes with their fields, and the scales of their scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np

from diffnet.geometry.mesh.mesh import MeshLike
from diffnet.viz.arrows import vector_arrows
from diffnet.viz.fields import PLAIN_COLOR, Field, Kind, make_field
from diffnet.viz.palette import Scale, make_scale
from diffnet.viz.surface import Surface, ValuesAt, surface_of

Meshes: TypeAlias = "MeshLike | list[Any]"


class Shape(NamedTuple):
    """A surface with its title, its fields, of which there is at least one, and its arrows.

    arrows: by the name of the field beside which they are drawn, or by "" if they are always drawn
    """

    title: str
    surface: Surface
    fields: list[Field]
    arrows: dict[str, Surface]

    def arrows_beside(self, field: Field) -> Surface | None:
        return self.arrows.get(field.name, self.arrows.get(""))


def make_shapes(
    mesh: Meshes,
    *,
    labels: Any,
    scalars: Any,
    colors: Any,
    vectors: Any,
    frames: Any,
    at: ValuesAt | Mapping[str, ValuesAt] | None,
    titles: str | Sequence[str] | None,
) -> list[Shape]:
    """The shapes of one mesh or of a list of meshes. `picture` explains the arguments.

    A surface without values gets a field of kind "colors" whose name is empty.
    """
    meshes = mesh if isinstance(mesh, list) else [mesh]
    if not meshes:
        raise ValueError("expected a mesh or a list of meshes, got an empty list")
    count = len(meshes) if isinstance(mesh, list) else None
    given = {"labels": labels, "scalars": scalars, "colors": colors, "vectors": vectors, "frames": frames}
    columns = {name: _per_shape(name, value, count) for name, value in given.items()}
    names = [""] * len(meshes) if titles is None else [titles] if isinstance(titles, str) else [*titles]
    if len(names) != len(meshes):
        raise ValueError(f"titles: {len(names)} titles do not fit {len(meshes)} shapes")
    return [
        _make_shape(str(names[i]), one, {name: column[i] for name, column in columns.items()}, at)
        for i, one in enumerate(meshes)
    ]


def scales_of(shapes: Sequence[Shape], color_map: Any, range: Any) -> dict[str, Scale]:
    """The scale of the scalars of each name, for all shapes together.

    color_map, range: see `make_scale`; for each name, if they are mappings
    """
    values: dict[str, list[Any]] = {}
    for shape in shapes:
        for field in shape.fields:
            if field.kind == "scalars":
                values.setdefault(field.name, []).append(field.values)
    return {
        name: make_scale(
            np.concatenate(parts),
            color_map.get(name, "viridis") if isinstance(color_map, Mapping) else color_map,
            range.get(name) if isinstance(range, Mapping) else range,
        )
        for name, parts in values.items()
    }


def _per_shape(name: str, value: Any, count: int | None) -> list[Any]:
    """The value for each of `count` shapes. None means that there is one shape, and not a list."""
    if count is None:
        return [value]
    if value is None:
        return [None] * count
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}: for a list of {count} meshes, expected a list, got {type(value).__name__}")
    if len(value) != count:
        raise ValueError(f"{name}: a list of {len(value)} does not fit {count} meshes")
    return list(value)


def _make_shape(title: str, mesh: Any, given: dict[str, Any], at: ValuesAt | Mapping[str, ValuesAt] | None) -> Shape:
    surface = surface_of(mesh)
    fields = []
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        values = given[kind]
        if values is None:
            continue
        named = values if isinstance(values, Mapping) else {kind: values}
        places = at if isinstance(at, Mapping) else dict.fromkeys(named, at)
        fields += [make_field(kind, str(name), each, surface, places.get(name)) for name, each in named.items()]
    if len({field.name for field in fields}) < len(fields):
        raise ValueError(f"two fields have one name: {', '.join(field.name for field in fields)}")
    if not fields:
        plain = np.tile(np.array(PLAIN_COLOR, np.uint8), (len(surface.verts), 1))
        fields = [Field("", "colors", "vertices", plain)]
    vectors = given["vectors"]
    by_name = {} if vectors is None else vectors if isinstance(vectors, Mapping) else {"": vectors}
    unknown = sorted(set(by_name) - {"", *(field.name for field in fields)})
    if unknown:
        raise ValueError(f"vectors: there are no values named {', '.join(map(repr, unknown))}")
    arrows = {name: vector_arrows(surface, each, given["frames"]) for name, each in by_name.items()}
    return Shape(title, surface, fields, arrows)
