"""Sets of pairs: template vertices, maps, choices of pairs, faults of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from refusals import refused
from scipy.spatial import cKDTree

from diffnet.data import DataError, MeshPairs, PairShape, Variants, load_pairs, pair_errors
from diffnet.data.pairs.partial import with_partial_copies
from diffnet.geometry import cut_by_plane, load_mesh, make_mesh

pytestmark = pytest.mark.usefixtures("one_thread")

VERTICES = 42  # of every mesh below


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Four meshes without correspondences, of which m0 and m1 are for training."""
    return write(tmp_path)


def write(folder: Path, count: int = 4, split: bool = True) -> Path:
    """Spheres with renumbered vertices. Half of them are for training."""
    names = [f"m{i}" for i in range(count)]
    (folder / "off").mkdir(parents=True)
    for i, name in enumerate(names):
        renumbered(i).export(folder / "off" / f"{name}.off")
    if split:
        (folder / "train.txt").write_text("\n".join(names[: count // 2]))
        (folder / "test.txt").write_text("\n".join(names[count // 2 :]))
    return folder


def order(seed: int) -> np.ndarray:
    """The vertex of mesh `seed` for each template point."""
    return np.random.default_rng(seed).permutation(VERTICES)


def renumbered(seed: int) -> trimesh.Trimesh:
    ball, place = trimesh.creation.icosphere(1), order(seed)
    verts = np.empty_like(ball.vertices)
    verts[place] = ball.vertices * [1, 1 + 0.1 * seed, 1]
    return trimesh.Trimesh(verts, place[ball.faces], process=False)


def write_vts(folder: Path, base: int = 0, place: str = "corres") -> Path:
    """The vertices at the template points of four meshes."""
    (folder / place).mkdir(exist_ok=True)
    for i in range(4):
        np.savetxt(folder / place / f"m{i}.vts", order(i) + base, fmt="%d")
    return folder


def names_of(pairs: list[tuple[int, int]], shapes: list[PairShape]) -> list[tuple[str, str]]:
    return [(shapes[i].name, shapes[j].name) for i, j in pairs]


@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("place", ["corres", "off"])
def test_template_vertices(four: Path, base: int, place: str) -> None:
    data = load_pairs(write_vts(four, base, place))
    assert data.is_supervised
    assert names_of(data.train_pairs, data.train) == [("m0", "m1")]
    assert names_of(data.test_pairs, data.test) == [("m2", "m3")]
    truth = data.truth(*data.test)
    np.testing.assert_array_equal(truth.vertices, order(2))
    np.testing.assert_array_equal(truth.points, order(3))
    assert data.mirrored_truth(*data.test) is None


def test_a_base_can_be_given(four: Path) -> None:
    write_vts(four)
    with pytest.raises(DataError, match=r"m0\.vts: entry \d+ is 0, but the vertices of .*m0\.off are .* from 1 to 42"):
        load_pairs(four, base="1")
    for i in range(4):
        inner = order(i)[(order(i) > 0) & (order(i) < VERTICES - 1)][:30] + 1  # from 2 to V - 1 fits both
        (four / "corres" / f"m{i}.vts").write_text("\n".join(map(str, inner)))
    refused(DataError, r"m0\.vts: the indices could count from 0 or from 1.*base 0 or 1", load_pairs, four)
    zero, one = (load_pairs(four, base=base).test[0].template for base in ("0", "1"))
    np.testing.assert_array_equal(zero, np.asarray(one) + 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("0\n99", r"m1\.vts: entry 2 is 99, but .*m1\.off has 42 vertices"),
        ("0\n42", r"m0\.vts has the index 0, but .*m1\.vts has the index 42"),
        ("0\n-1", r"m1\.vts: entry 2 is -1, which marks a missing point.*Partial shapes are not supported"),
        ("0\nnan", r"m1\.vts, line 2: 'nan' is not a whole number"),
        ("0\n1", r"m1\.vts: 2 template points, but .*m0\.vts has 42"),
        ("", r"m1\.vts: there are no"),
        (None, r"m1\.off: there is no m1\.vts; 3 other meshes have one"),
    ],
)
def test_faults_of_template_vertices(four: Path, content: str | None, words: str) -> None:
    file = write_vts(four) / "corres" / "m1.vts"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(DataError, match=words) as error:
        load_pairs(four)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["{}_{}.txt", "{}-{}.map"])
def test_maps(four: Path, form: str) -> None:
    (four / "maps").mkdir()
    for i, j in ((0, 1), (3, 2)):
        own = np.empty(VERTICES, np.int64)
        own[order(i)] = order(j)
        np.savetxt(four / "maps" / form.format(f"m{i}", f"m{j}"), own + 1, fmt="%d")
    data = load_pairs(four)
    assert names_of(data.train_pairs, data.train) == [("m0", "m1")]
    assert names_of(data.test_pairs, data.test) == [("m3", "m2")]
    first, second = data.test[1], data.test[0]
    truth = data.truth(first, second)
    np.testing.assert_array_equal(truth.vertices, np.arange(VERTICES))
    np.testing.assert_array_equal(np.asarray(truth.points)[order(3)], order(2))
    assert data.truth(second, first) is None
    (four / "pairs.txt").write_text("m2 m3")
    refused(DataError, r"pairs\.txt: there is no map from m2 to m3", load_pairs, four)
    (four / "maps" / form.format("m0", "m1")).write_text("1\n2")
    refused(DataError, r"m0.m1\.\w+: 2 entries, but .*m0\.off has 42 vertices", load_pairs, four)


@pytest.mark.parametrize("form", ["template", "map"])
def test_partial_shapes(four: Path, form: str) -> None:
    """m2 lacks the template points 0 to 9, and m3 5 to 19."""
    first, second = order(2).copy(), order(3).copy()
    if form == "template":
        write_vts(four, 1)
        for name, numbers, missing in (("m2", first, range(10)), ("m3", second, range(5, 20))):
            numbers[missing] = -2
            np.savetxt(four / "corres" / f"{name}.vts", numbers + 1, fmt="%d")
    else:
        (four / "maps").mkdir()
        for i, j in ((0, 1), (2, 3)):
            own = np.full(VERTICES, -1)
            own[order(i)[20:]] = order(j)[20:]
            np.savetxt(four / "maps" / f"m{i}_m{j}.txt", own, fmt="%d")
    with pytest.raises(DataError, match=r"marks a missing point, as on a partial shape\. Partial shapes are not supp"):
        load_pairs(four)
    data = load_pairs(four, base="1" if form == "template" else "0", partial_shapes=True)
    truth = data.truth(*data.test)
    assert sorted(zip(truth.vertices, truth.points, strict=True)) == sorted(
        zip(order(2)[20:], order(3)[20:], strict=True)
    )
    inside, inside_second = data.overlap(*data.test)
    assert sorted(np.flatnonzero(inside == 1)) == sorted(order(2)[20:])
    assert sorted(np.flatnonzero(inside_second == 1)) == sorted(order(3)[20:])
    if form == "template":
        assert (inside[order(2)[10:20]] == 0).all()
        assert (inside[order(2)[:10]] == -1).all()  # nothing says where these vertices belong
        assert (inside_second[order(3)[:5]] == 0).all()
    else:
        assert (inside[order(2)[:20]] == 0).all()
        near = np.unique(renumbered(3).faces[np.isin(renumbered(3).faces, order(3)[20:]).any(1)])
        assert set(np.flatnonzero(inside_second == -1)) == set(near) - set(order(3)[20:])


@pytest.mark.parametrize("form", ["template", "map"])
def test_partial_copies_have_the_truth_of_their_wholes(form: str) -> None:
    balls = [renumbered(i) for i in range(2)]
    meshes = [make_mesh(ball.vertices, ball.faces) for ball in balls]
    templates: list[Any] = [order(0), order(1)] if form == "template" else [None, None]
    more: dict[str, Any] = {}
    whole = np.empty(VERTICES, np.int64)
    whole[order(0)] = order(1)
    if form == "map":
        more = {"maps": {("m0", "m1"): whole}}
    shapes = [PairShape(f"m{i}", mesh, templates[i]) for i, mesh in enumerate(meshes)]
    data = with_partial_copies(MeshPairs(shapes, [], [(0, 1)], [], **more), Variants(6, cut=0.6), seed=0)
    assert [len(data.train), len(data.train_pairs)] == [2 + 2 * 6, 6]
    assert [shape.name for shape in data.train[2:4]] == ["m0, part 1", "m0, part 2"]
    again = with_partial_copies(MeshPairs(shapes, [], [(0, 1)], [], **more), Variants(6, cut=0.6), seed=0)
    assert again.train_pairs == data.train_pairs
    for i, j in data.train_pairs:
        first, second = data.train[i], data.train[j]
        kept = [np.arange(VERTICES) if shape.vertices is None else shape.vertices for shape in (first, second)]
        truth = data.truth(first, second)
        np.testing.assert_array_equal(kept[1][truth.points], whole[kept[0][truth.vertices]])
        inside, inside_second = data.overlap(first, second)
        np.testing.assert_array_equal(inside == 1, np.isin(whole[kept[0]], kept[1]))
        np.testing.assert_array_equal(inside_second == 1, np.isin(kept[1], whole[kept[0]]))
        assert len(truth.vertices) == (inside == 1).sum()
        assert min(inside.min(), inside_second.min()) >= 0


def test_errors_of_partial_shapes_are_in_the_area_of_the_larger_one() -> None:
    ball = trimesh.creation.icosphere(2)
    whole = PairShape("whole", make_mesh(ball.vertices, ball.faces), np.arange(162))
    part = cut_by_plane(whole.mesh, [1, 0, 0], 0.5)
    numbers = np.full(162, -1)
    numbers[part.vertices] = np.arange(len(part.vertices))
    half = PairShape("half", part.mesh, numbers)
    data = MeshPairs([], [whole, half], [], [(0, 1), (1, 0)])
    away = np.roll(np.arange(len(part.vertices)), 1)
    there = np.zeros(162, np.int64)
    there[part.vertices] = away
    found = pair_errors(data, [(whole, half), (half, whole)], [there, part.vertices[away]], jobs=1)
    assert [len(each.errors) for each in found] == [len(away)] * 2
    assert found[0].errors.mean() == pytest.approx(found[1].errors.mean(), rel=0.05)  # the same distances
    apart = PairShape("apart", make_mesh(ball.vertices, ball.faces), np.full(162, -1))
    assert len(pair_errors(data, [(apart, whole)], [there], jobs=1)[0].errors) == 0


def test_without_correspondences(tmp_path: Path) -> None:
    data = load_pairs(write(tmp_path, 5, split=False), test_fraction=0.4)
    assert not data.is_supervised
    Path(data.train[0].mesh.name).with_name("notes.txt").write_text("no map\n")
    assert not load_pairs(tmp_path).is_supervised
    assert (len(data.train), len(data.test), len(data.train_pairs), len(data.test_pairs)) == (3, 2, 3, 1)
    assert data.truth(*data.test) is None
    scored = load_pairs(tmp_path, needs_train=False)
    assert (len(scored.train_pairs), len(scored.test_pairs)) == (0, 10)
    with pytest.raises(ValueError, match=r"true correspondences of m\d and m\d are not known"):
        pair_errors(data, [(data.test[0], data.test[1])], [np.zeros(VERTICES, np.int64)])


@pytest.mark.parametrize(("count", "tests"), [(4, 2), (6, 2), (15, 3)])
def test_few_meshes_have_a_pair_in_each_part(tmp_path: Path, count: int, tests: int) -> None:
    data = load_pairs(write(tmp_path, count, split=False))
    assert (len(data.train), len(data.test)) == (count - tests, tests)
    assert data.train_pairs
    assert data.test_pairs
    for i in range(3, count):
        (tmp_path / "off" / f"m{i}.off").unlink()
    refused(DataError, r"no pairs \(all\) of test meshes. This part has 1 mesh; train.txt", load_pairs, tmp_path)


def test_pairs_within_and_across_folders(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        write(tmp_path / name)
    for place in (tmp_path, [tmp_path / "cats", tmp_path / "dogs"]):
        counts = {rule: len(load_pairs(place, rule).test_pairs) for rule in ("all", "within", "across")}
        assert counts == {"all": 6, "within": 2, "across": 4}
    data = load_pairs(tmp_path, "within")
    assert names_of(data.test_pairs, data.test) == [("cats/m2", "cats/m3"), ("dogs/m2", "dogs/m3")]
    (tmp_path / "pairs.txt").write_text("dogs/m2.off cats/m3")
    data = load_pairs(tmp_path)
    assert names_of(data.test_pairs, data.test) == [("dogs/m2", "cats/m3")]
    refused(DataError, r"there are no pairs \(across\) of train meshes", load_pairs, tmp_path / "cats", "across")
    refused(DataError, "pairs should be one of all, within, across, or a file", load_pairs, tmp_path, "some")


def test_folders_with_templates_of_their_own(tmp_path: Path) -> None:
    """They may count from 0 and from 1, and have other numbers of points."""
    for name, base in (("cats", 1), ("dogs", 0)):
        write_vts(write(tmp_path / name), base)
    assert len(load_pairs(tmp_path).test_pairs) == 6
    for i in range(4):
        (tmp_path / "dogs" / "corres" / f"m{i}.vts").write_text("0\n5\n7")
    data = load_pairs(tmp_path, "within")
    np.testing.assert_array_equal(data.truth(*data.test[2:]).points, [0, 5, 7])
    for rule in ("all", "across"):
        refused(DataError, r"has 42 template points, but .* has 3, so they are no pair", load_pairs, tmp_path, rule)


def test_mirrored_template_points(four: Path) -> None:
    mirror = np.roll(np.arange(VERTICES), 1)
    np.savetxt(four / "mirror.txt", mirror, fmt="%d")
    data = load_pairs(write_vts(four))
    mirrored = data.mirrored_truth(*data.test)
    np.testing.assert_array_equal(mirrored.vertices, order(2))
    np.testing.assert_array_equal(mirrored.points, order(3)[mirror])
    np.savetxt(four / "mirror.txt", mirror[:9], fmt="%d")
    refused(DataError, r"mirror\.txt: 9 mirror images, but there are 42 template points", load_pairs, four)


def test_mirror_images_of_each_folder(tmp_path: Path) -> None:
    """Each folder has template points and a symmetry of its own. The only symmetry is that of all folders."""
    images = {"cats": np.roll(np.arange(VERTICES), 1), "dogs": np.arange(VERTICES)[::-1]}
    for name, image in images.items():
        write_vts(write(tmp_path / name))
        np.savetxt(tmp_path / name / "mirror.txt", image, fmt="%d")
    for _ in range(2):
        data = load_pairs(tmp_path, "within")
        for pair in data.test_shapes:
            image = images[Path(pair[0].folder).name]
            np.testing.assert_array_equal(data.mirrored_truth(*pair).points, pair[1].template[image])
        (tmp_path / "dogs" / "mirror.txt").unlink(missing_ok=True)
        images["dogs"] = images["cats"]
    for i in range(4):
        (tmp_path / "dogs" / "corres" / f"m{i}.vts").write_text("0\n5\n7")
    data = load_pairs(tmp_path, "within")
    assert [data.mirrored_truth(*pair) is None for pair in data.test_shapes] == [False, True]


def test_mirror_images_of_each_mesh(four: Path) -> None:
    write_vts(four)
    for i in range(4):
        np.savetxt(four / "corres" / f"m{i}.sym.vts", order(i)[::-1], fmt="%d")
    data = load_pairs(four)
    mirrored = data.mirrored_truth(*data.test)
    np.testing.assert_array_equal(mirrored.vertices, order(2))
    np.testing.assert_array_equal(mirrored.points, order(3)[::-1])
    flipped = np.empty(VERTICES, np.int64)
    flipped[order(2)] = order(3)[::-1]
    assert pair_errors(data, [(data.test[0], data.test[1])], [flipped], jobs=1)[0].flipped
    (four / "corres" / "m2.sym.vts").unlink()
    refused(DataError, r"m2\.off: there is no m2\.sym\.vts; 3 other meshes have one", load_pairs, four)


def test_classes_in_folders(tmp_path: Path) -> None:
    """As DT4D-H is published: meshes and template points of each class in a folder, and lists of CLASS/NAME."""
    for name in ("crypto", "ninja"):
        write_vts(write(tmp_path / name, split=False), base=1)
        for place in ("off", "corres"):
            (tmp_path / "set" / place).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / place).rename(tmp_path / "set" / place / name)
    (tmp_path / "set" / "train.txt").write_text("crypto/m0\ncrypto/m1\nninja/m2\n")
    (tmp_path / "set" / "test.txt").write_text("crypto/m2\nninja/m0\nninja/m3\ncrypto/m3\n")
    data = load_pairs(tmp_path / "set", "within")
    within = [("crypto/m2", "crypto/m3"), ("ninja/m0", "ninja/m3")]
    assert names_of(data.test_pairs, data.test) == within
    np.testing.assert_array_equal(data.truth(data.test[1], data.test[2]).points, order(3))


@pytest.mark.parametrize("place", ["corres/cross_category_corres", "cross_category_corres"])
def test_correspondences_between_classes(tmp_path: Path, place: str) -> None:
    """As DT4D-H is published: for each template point of a class, one of another class. Their numbers may differ."""
    for name, count in (("crypto", 42), ("ninja", 30), ("ortiz", 20)):
        (tmp_path / "corres" / name).mkdir(parents=True)
        write(tmp_path / "off" / name, 2, split=False)
        for file in (tmp_path / "off" / name / "off").iterdir():
            file.rename(tmp_path / "off" / name / file.name)
        for i in range(2):
            np.savetxt(tmp_path / "corres" / name / f"m{i}.vts", order(i)[:count] + 1, fmt="%d")
    (tmp_path / place).mkdir(exist_ok=True)
    there = np.random.default_rng(0).integers(0, 30, 42)
    np.savetxt(tmp_path / place / "crypto_ninja.vts", there + 1, fmt="%d")
    data = load_pairs(tmp_path, "across", base="1", needs_train=False)
    names = names_of(data.test_pairs, data.test)
    assert names == [(f"crypto/m{i}", f"ninja/m{j}") for i in (0, 1) for j in (0, 1)]
    assert len(load_pairs(tmp_path, base="1", needs_train=False).test_pairs) == 4 + 3
    first, second = data.test[0], data.test[3]
    truth, back = data.truth(first, second), data.truth(second, first)
    np.testing.assert_array_equal([truth.vertices, truth.points], [order(0), order(1)[there]])
    np.testing.assert_array_equal([back.points, back.vertices], [order(0), order(1)[there]])
    partial = {"base": "1", "needs_train": False, "partial_shapes": True}
    np.savetxt(tmp_path / "corres/crypto/m0.vts", [-1, *order(0)[1:] + 1], fmt="%d")
    data = load_pairs(tmp_path, "across", **partial)
    truth = data.truth(data.test[0], data.test[3])
    np.testing.assert_array_equal([truth.vertices, truth.points], [order(0)[1:], order(1)[there[1:]]])
    np.savetxt(tmp_path / place / "crypto_ninja.vts", [-1, *there[1:] + 1], fmt="%d")
    refused(
        DataError, "crypto_ninja.vts: a point of the template of crypto is missing", load_pairs, tmp_path, **partial
    )
    np.savetxt(tmp_path / "corres/crypto/m0.vts", order(0) + 1, fmt="%d")
    np.savetxt(tmp_path / place / "crypto_ninja.vts", there + 1, fmt="%d")
    (tmp_path / "pairs.txt").write_text("ninja/m0 ortiz/m1\n")
    refused(DataError, "there is no map from ninja/m0 to ortiz/m1", load_pairs, tmp_path, base="1", needs_train=False)
    np.savetxt(tmp_path / place / "ninja_ortiz.vts", np.arange(20) + 1, fmt="%d")
    refused(DataError, "ninja_ortiz.vts: 20 entries, but .*ninja has 30 template", load_pairs, tmp_path, base="1")


def test_registered_meshes(tmp_path: Path) -> None:
    """Their vertices correspond by number. Other faces are refused."""
    for i in range(4):
        ball = trimesh.creation.icosphere(1)
        ball.apply_scale([1, 1 + i, 1])
        ball.export(tmp_path / f"m{i}.off")
    data = load_pairs(tmp_path, registered=True)
    np.testing.assert_array_equal(data.truth(*data.test).points, np.arange(VERTICES))
    assert not load_pairs(tmp_path).is_supervised
    renumbered(1).export(tmp_path / "m3.off")
    refused(DataError, r"m\d\.off: registered meshes should have the faces of", load_pairs, tmp_path, registered=True)


def test_listed_pairs(tmp_path: Path) -> None:
    write(tmp_path, 6)
    (tmp_path / "pairs.txt").write_text("m5 m3\nm3.off, m4.off\n")
    data = load_pairs(tmp_path)
    assert names_of(data.test_pairs, data.test) == [("m5", "m3"), ("m3", "m4")]
    assert len(data.train_pairs) == 3  # the list names none, so all
    assert len(load_pairs(tmp_path, "all").test_pairs) == 3
    for line, words in (
        ("m5 m9", r"pairs\.txt, line 1: there is no mesh 'm9'"),
        ("m5", r"pairs\.txt, line 1: expected the names of two meshes, got 'm5'"),
        ("m0 m5", "one of m0 and m5 is for training, one for testing"),
    ):
        (tmp_path / "pairs.txt").write_text(line)
        refused(DataError, words, load_pairs, tmp_path)


def test_errors_and_flips() -> None:
    """Ellipsoids with the mirror images in x."""
    ball = trimesh.creation.icosphere(2)
    meshes = [make_mesh(ball.vertices * [1, 1 + 0.1 * i, 1], ball.faces, name=f"e{i}") for i in range(2)]
    mirror = cKDTree(ball.vertices).query(ball.vertices * [-1, 1, 1])[1]
    points = np.arange(len(mirror))
    first, second = (PairShape(mesh.name, mesh, points, mirrored=mirror) for mesh in meshes)
    data = MeshPairs([], [first, second], [], [(0, 1)])
    right, flipped = (truth(first, second).points for truth in (data.truth, data.mirrored_truth))
    found = pair_errors(data, [(first, second)] * 2, [right, flipped])
    assert [one.flipped for one in found] == [False, True]
    assert found[0].errors.max() == 0
    np.testing.assert_array_equal(found[0].errors, found[0].unflipped)
    assert found[1].errors.mean() > 0.2
    assert found[1].unflipped.max() == 0
    with pytest.raises(ValueError, match=r"e0: a predicted map should be integers of shape \(162,\)"):
        pair_errors(data, [(first, second)], [right[:5]])


def test_maps_whose_names_fit_two_pairs(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(1)
    for name in ("a", "b_c", "a_b", "c"):
        ball.export(tmp_path / f"{name}.off")
    np.savetxt(tmp_path / "a_b_c.txt", np.arange(VERTICES), fmt="%d")
    message = r"a_b_c.txt: the name fits the pairs \(a, b_c\) and \(a_b, c\)"
    refused(DataError, message, load_pairs, tmp_path, needs_train=False)
    (tmp_path / "maps").mkdir()
    (tmp_path / "a_b_c.txt").rename(tmp_path / "maps" / "a-c.txt")
    np.save(tmp_path / "a_c.npy", np.arange(VERTICES))
    refused(DataError, r"a_c.npy: .*maps/a-c.txt is a map of these two meshes", load_pairs, tmp_path, needs_train=False)


def test_point_clouds(four: Path) -> None:
    for file in list((four / "off").iterdir()):
        trimesh.PointCloud(load_mesh(file).verts).export(file.with_suffix(".ply"))
        file.unlink()
    data = load_pairs(write_vts(four))
    assert data.test[0].mesh.is_point_cloud
    first, second = data.test
    right = np.empty(VERTICES, np.int64)
    right[order(2)] = order(3)
    assert pair_errors(data, [(first, second)], [right])[0].errors.max() == 0
