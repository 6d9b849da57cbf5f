from .arrays import array_statistics, own_arrays
from .augmentation import augmented
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
from .labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes, LabelsAt, TargetsAt
from .options import Preprocessing, Variants
from .samples import MeshBatches, Sample, collate_samples, epoch_seed, make_sample
from .variants import make_variants

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
    "Preprocessing",
    "Sample",
    "Statistics",
    "TargetsAt",
    "Variants",
    "array_statistics",
    "augmented",
    "available_cores",
    "canonical_features",
    "check_statistics",
    "collate_samples",
    "epoch_seed",
    "feature_channels",
    "feature_parts",
    "figure",
    "figures",
    "fill_cache",
    "input_features",
    "labels_at",
    "load_classes",
    "load_dataset",
    "load_meanwhile",
    "make_sample",
    "make_variants",
    "own_arrays",
    "precompute_all",
    "prepare",
    "rotate_vectors",
    "shapes",
    "vector_channels",
    "with_label_names",
    "with_labels_at",
]
