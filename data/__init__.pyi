from .arrays import array_statistics, own_arrays
from .conversion import labels_at, with_label_names, with_labels_at
from .feature_names import (
    FEATURE_CHANNELS,
    ArrayStatistics,
    FeatureKind,
    FeaturePart,
    Statistics,
    canonical_features,
    check_statistics,
    feature_channels,
    feature_parts,
    vector_channels,
)
from .features import (
    available_cores,
    fill_cache,
    input_features,
    load_meanwhile,
    precompute_all,
    prepare,
    rotate_vectors,
)
from .folders.classes import load_classes
from .folders.layouts import LAYOUTS, Layout, load_dataset
from .generated.classes import shapes
from .generated.dataset import figure, figures
from .generated.pairs import figure_pairs
from .labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes, LabelsAt, TargetsAt
from .options import Preprocessing
from .pairs.folders import load_pairs, save_pairs
from .pairs.samples import PairSample, collate_pairs
from .pairs.scoring import PairErrors, pair_errors
from .pairs.shapes import MeshPairs, PairShape, Truth
from .samples import MeshBatches, Sample, collate_samples, epoch_seed, make_sample

__all__ = [
    "FEATURE_CHANNELS",
    "LAYOUTS",
    "UNLABELED",
    "ArrayStatistics",
    "DataError",
    "FeatureKind",
    "FeaturePart",
    "LabeledMesh",
    "LabeledMeshes",
    "LabelsAt",
    "Layout",
    "MeshBatches",
    "MeshPairs",
    "PairErrors",
    "PairSample",
    "PairShape",
    "Preprocessing",
    "Sample",
    "Statistics",
    "TargetsAt",
    "Truth",
    "array_statistics",
    "available_cores",
    "canonical_features",
    "check_statistics",
    "collate_pairs",
    "collate_samples",
    "epoch_seed",
    "feature_channels",
    "feature_parts",
    "figure",
    "figure_pairs",
    "figures",
    "fill_cache",
    "input_features",
    "labels_at",
    "load_classes",
    "load_dataset",
    "load_meanwhile",
    "load_pairs",
    "make_sample",
    "own_arrays",
    "pair_errors",
    "precompute_all",
    "prepare",
    "rotate_vectors",
    "save_pairs",
    "shapes",
    "vector_channels",
    "with_label_names",
    "with_labels_at",
]
