"""Draw scalars, labels and vectors of a surface: two pictures, an HTML page and a PLY file."""

import tempfile
from pathlib import Path

import trimesh

from diffnet import gradient, precompute, viz


def main(folder: str | None = None) -> None:
    out = Path(folder or tempfile.mkdtemp())
    mesh = trimesh.creation.torus(1, 0.4)
    operators = precompute(mesh, k=8)
    wave = operators.evecs[:, 3]
    slope = gradient(wave[:, None], operators)[..., 0].T  # (V, 2), in the tangent frames
    signs, names = (wave > 0).long(), ["valley", "hill"]
    arrows = {"vectors": slope, "frames": operators}
    viz.picture(mesh, scalars={"wave": wave}, color_map="coolwarm", **arrows).save(out / "wave.png")
    viz.picture([mesh, mesh], labels=[signs, 1 - signs], label_names=names, titles=["+", "-"]).save(out / "signs.png")
    viz.page(mesh, labels={"sign": signs}, label_names=names, scalars={"wave": wave}, **arrows).save(out / "view.html")
    viz.write_ply(out / "wave.ply", mesh, labels=signs, scalars={"wave": wave})
    print(f"wrote {', '.join(sorted(path.name for path in out.iterdir()))} to {out}")


if __name__ == "__main__":
    main()
