"""People in poses: surfaces by the package `anny`, whose data are CC0.

Coordinates are in meters: x to the left of the body, -y to its front, z up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.spatial.transform import Rotation
from trimesh import Trimesh

from diffnet.benchmarks.bodies.meshers import cut_share, filtered, surface

# Each part, with how the names of its bones begin.
PARTS = {
    "head": ("neck02", "neck03", "head", "eye"),
    "torso": ("root", "pelvis", "spine", "clavicle", "shoulder", "neck01"),
    "upper_arm": ("upperarm",),
    "lower_arm": ("lowerarm",),
    "hand": ("wrist", "finger", "metacarpal"),
    "upper_leg": ("upperleg",),
    "lower_leg": ("lowerleg",),
    "foot": ("foot", "toe"),
}
FACE = ("eye", "nose", "mouth", "chin", "cheek", "ear-", "forehead", "trans")
TRIES = 8
MAX_CUTS = 0.01  # faces that cut others. Lips and toes alone are 0.004.


@dataclass(frozen=True)
class Pose:
    """Angles in degrees.

    arms: (2, 4) of left and right: elevation from hanging, azimuth (0 sideways, 90 to the front), twist, elbow
    legs: (2, 4): flexion, abduction, twist, knee
    spine: (3,): forward, sideways, twist
    """

    arms: np.ndarray
    legs: np.ndarray
    spine: np.ndarray


def random_pose(rng: np.random.Generator) -> Pose:
    """A person who stands, moves, or sits or crouches."""
    kind = rng.choice(["stands", "moves", "sits"], p=[0.35, 0.45, 0.2])
    if kind == "stands":
        both = rng.normal((25, 0, 0, 15), (20, 20, 15, 12))
        arms = both + rng.normal(0, 5, (2, 4))
        legs = rng.normal((0, 6, 0, 3), (4, 4, 4, 4), (2, 4))
        spine = rng.normal(0, 4, 3)
    else:
        arms = np.stack([rng.uniform((5, -60, -60, 0), (155, 85, 60, 100)) for _ in range(2)])
        legs = rng.normal((10, 8, 0, 10), (25, 8, 8, 12), (2, 4))
        legs[:, 3] += 0.7 * legs[:, 0].clip(0)
        spine = rng.normal((10, 0, 0), (16, 10, 18))
        if kind == "sits":
            legs[:, 0], legs[:, 3] = (
                rng.uniform(50, 95) + rng.normal(0, 6, 2),
                rng.uniform(60, 112) + rng.normal(0, 8, 2),
            )
            legs[:, 1] = rng.uniform(4, 28, 2)
    arms[:, 0], arms[:, 3], legs[:, 3] = arms[:, 0].clip(8, 160), arms[:, 3].clip(2, 110), legs[:, 3].clip(0, 115)
    return Pose(arms, legs, spine)


class Body:
    """The skin of `anny` as one closed surface, without eyes and mouth.

    rest: the surface of the average person
    shares: (V, 8), how much of each vertex belongs to each of PARTS
    """

    def __init__(self) -> None:
        import anny
        from anny.face_segmentation import get_face_segmentation_mask

        torch.set_num_threads(1)
        self._model: Any = anny.Anny(
            topology="anny-noeyes-notongue",
            phenotypes="all",
            local_changes="default",
            skinning_method="lbs",
            extrapolate_phenotypes=True,
        )
        inside = get_face_segmentation_mask(self._model, ["mouth_cavity", "eye_cavity.L", "eye_cavity.R"]).numpy()
        points = self._model(phenotype_kwargs={}, pose_parameters=None)["vertices"][0].numpy().astype(float)
        self._used, faces = np.unique(np.asarray(self._model.faces)[~inside], return_inverse=True)
        skin = surface(points[self._used], faces.reshape(-1, 3))
        self.rest = filtered(skin, ("meshing_close_holes", {"maxholesize": 60}))
        self.shares = self._part_shares(len(points))
        self._changes: dict[str, list[str]] = {}  # of single parts, those of left and right together
        for name in self._model.local_change_labels:
            if not any(word in name for word in FACE):
                self._changes.setdefault(name.removeprefix("l-").removeprefix("r-"), []).append(name)

    def _part_shares(self, count: int) -> np.ndarray:
        """The weights of the bones, smoothed, so that parts may end elsewhere."""
        bones = self._model.bone_labels
        part = np.array([next(i for i, names in enumerate(PARTS.values()) if b.startswith(names)) for b in bones])
        shares = np.zeros((count, len(PARTS)))
        for bone, weight in zip(
            self._model.vertex_bone_indices.T.numpy(), self._model.vertex_bone_weights.T.numpy(), strict=True
        ):
            np.add.at(shares, (np.arange(count), part[bone]), weight)
        shares = shares[self._used]
        edges = np.concatenate([self.rest.edges_unique, self.rest.edges_unique[:, ::-1]])
        near = sparse.coo_matrix((np.ones(len(edges)), edges.T), (len(shares),) * 2).tocsr()
        near = sparse.diags_array(1 / np.asarray(near.sum(1)).ravel()) @ near
        for _ in range(12):
            shares = 0.5 * (shares + near @ shares)
        return shares

    def random_person(self, rng: np.random.Generator, age: tuple[float, float] = (0.3, 0.95)) -> dict[str, Any]:
        """The shape of a person, slightly asymmetric.

        age: the range of ages; 0.33 is a child, and 0.67 a young adult
        """
        low_high = {"age": age, "muscle": (0, 1.1), "weight": (-0.1, 1.3), "height": (0, 1), "proportions": (0.1, 1)}
        kinds = {name: float(rng.uniform(*ends)) for name, ends in low_high.items()}
        kinds |= {name: float(rng.uniform(0.2, 0.8)) for name in ("cupsize", "firmness")}
        kinds["gender"] = float(np.clip(rng.integers(2) + rng.normal(0, 0.12), 0, 1))
        kinds |= dict(zip(("african", "asian", "caucasian"), rng.dirichlet([0.7] * 3).tolist(), strict=True))
        local: dict[str, float] = {}
        size = rng.uniform(0.15, 0.5)
        for key in rng.choice(list(self._changes), 40, replace=False):
            value = rng.normal(0, size)
            local |= {name: float(np.clip(value + rng.normal(0, 0.08), -1, 1)) for name in self._changes[key]}
        return {"phenotype_kwargs": kinds, "local_changes_kwargs": local}

    def posed(self, person: dict[str, Any], rng: np.random.Generator) -> Trimesh:
        """A person in a random pose: of several, the first in which the body hardly cuts itself, or else the best."""
        heads = self._model(**person, pose_parameters=None)["rest_bone_poses"][0, :, :3, 3].numpy()
        bones = dict(zip(self._model.bone_labels, heads, strict=True))
        best, least = self.rest, 2.0
        for _ in range(TRIES):
            delta = torch.eye(4).repeat(1, len(heads), 1, 1)
            for name, turn in bone_rotations(bones, random_pose(rng), rng).items():
                delta[0, self._model.bone_labels.index(name), :3, :3] = torch.tensor(turn.as_matrix())
            points = self._model(**person, pose_parameters=delta)["vertices"][0].numpy().astype(float)[self._used]
            mesh = surface(points, self.rest.faces)
            if (share := cut_share(mesh)) < least:
                best, least = mesh, share
            if least < MAX_CUTS:
                break
        bumps = [0.002 * waves(best.vertices, rng.uniform(10, 25), rng) for _ in range(3)]
        return surface(best.vertices + np.stack(bumps, 1), best.faces)


def bone_rotations(bones: dict[str, np.ndarray], pose: Pose, rng: np.random.Generator) -> dict[str, Rotation]:
    """The rotation of each bone from its rest, in the axes of the body. Rotations of its parents move it along.

    bones: where each bone begins
    """
    turns: dict[str, Rotation] = {}
    for side, sign, arm, leg in (("L", 1, *_of(pose, 0)), ("R", -1, *_of(pose, 1))):
        starts = {name[:-2]: point * (sign, 1, 1) for name, point in bones.items() if name.endswith(f".{side}")}
        local = {**_arm(starts, arm, rng), **_leg(leg)}
        # A reflection turns the signs of rotations about y and z.
        turns |= {f"{name}.{side}": Rotation.from_rotvec(v * np.array((1, sign, sign))) for name, v in local.items()}
    forward, side_bend, twist = np.radians(pose.spine)
    for names, share in (
        (("spine05", "spine04", "spine03", "spine02", "spine01"), 1.0),
        (("neck01", "neck02", "neck03", "head"), -0.3),
    ):
        bend = np.array((forward, side_bend, twist)) * share + rng.normal(0, 0.08, 3)
        turns |= dict.fromkeys(names, Rotation.from_rotvec(bend / len(names)))
    return turns


def _of(pose: Pose, side: int) -> tuple[np.ndarray, np.ndarray]:
    return np.radians(pose.arms[side]), np.radians(pose.legs[side])


def _arm(starts: dict[str, np.ndarray], angles: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rotation vectors of the left arm."""
    elevation, azimuth, twist, elbow = angles
    upper, lower = _unit(starts["lowerarm01"] - starts["upperarm01"]), _unit(starts["wrist"] - starts["lowerarm01"])
    aside = np.sin(elevation)
    aim = np.array((aside * np.cos(azimuth), -aside * np.sin(azimuth), -np.cos(elevation)))
    lift = _unit(np.cross(upper, aim) + 1e-9) * np.arccos(np.clip(upper @ aim, -1, 1))
    shoulder = Rotation.from_rotvec(0.75 * lift) * Rotation.from_rotvec(0.6 * twist * upper)
    joint = [starts[f"finger3-{j}"] for j in (1, 2, 3)]
    curl = _unit(np.cross(joint[1] - joint[0], joint[2] - joint[1])) * np.radians(rng.uniform(-10, 35))
    return {
        "clavicle": 0.1 * lift,
        "shoulder01": 0.15 * lift,
        "upperarm01": shoulder.as_rotvec(),
        "upperarm02": 0.4 * twist * upper,
        "lowerarm01": _unit(np.cross(upper, lower)) * (elbow - np.arccos(upper @ lower)),
        "lowerarm02": lower * rng.normal(0, 0.3),
        "wrist": rng.normal(0, 0.15, 3),
        **{f"finger{i}-{j}": curl for i in (2, 3, 4, 5) for j in (1, 2, 3)},
    }


def _leg(angles: np.ndarray) -> dict[str, np.ndarray]:
    """Rotation vectors of the left leg. The knee is bent by 0.1 at rest."""
    flexion, abduction, twist, knee = angles
    thigh = Rotation.from_euler("XYZ", [-flexion, -abduction, twist]).as_rotvec()
    return {"upperleg01": thigh, "lowerleg01": np.array((knee - 0.1, 0, 0))}


def waves(points: np.ndarray, frequency: float, rng: np.random.Generator) -> np.ndarray:
    """A random smooth function (V,) of about so many radians per meter, of variance 1."""
    directions = rng.normal(size=(3, 16))
    directions *= frequency * rng.uniform(0.5, 1.3, 16) / np.linalg.norm(directions, axis=0)
    return np.cos(points @ directions + rng.uniform(0, 2 * np.pi, 16)).sum(1) / np.sqrt(8)


def _unit(v: np.ndarray) -> np.ndarray:
    return v / np.linalg.norm(v)
