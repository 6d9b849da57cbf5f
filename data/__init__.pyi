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
    check_target_statistics,
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
from .folders.targets import load_targets
from .generated.classes import shapes
from .generated.dataset import curved_figure, figure, figures
from .labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes, LabelsAt, TargetsAt
from .options import Preprocessing
from .samples import MeshBatches, Sample, collate_samples, epoch_seed, make_sample
from .target_names import target_parts
from .targets import original_targets, standardized_targets, target_statistics, with_columns

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
    "array_statistics",
    "available_cores",
    "canonical_features",
    "check_statistics",
    "check_target_statistics",
    "collate_samples",
    "curved_figure",
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
    "load_targets",
    "make_sample",
    "original_targets",
    "own_arrays",
    "precompute_all",
    "prepare",
    "rotate_vectors",
    "shapes",
    "standardized_targets",
    "target_parts",
    "target_statistics",
    "vector_channels",
    "with_columns",
    "with_label_names",
    "with_labels_at",
]
