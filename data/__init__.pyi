from .arrays import array_statistics, own_arrays
from .augmentation import augmented
from .conversion import chosen_classes, labels_at, with_label_names, with_labels_at, without_classes
from .decimation import (
    decimated,
    decimated_to_score,
    interpolation_weights,
    transferred_labels,
    with_few_faces,
)
from .feature_names import (
    FEATURE_CHANNELS,
    ArrayStatistics,
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
from .folders.indexed import IndexedDataset, IndexedMeshes, index_classes, index_dataset, index_targets
from .folders.layouts import LAYOUTS, Layout, load_dataset
from .folders.targets import load_targets
from .labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes, LabelsAt, TargetsAt
from .options import Preprocessing, Variants
from .pairs.folders import load_pairs, save_pairs
from .pairs.samples import PairedMeshes, PairSample, collate_pairs, paired_meshes
from .pairs.scoring import PairErrors, pair_errors
from .pairs.shapes import MeshPairs, PairShape, Truth
from .parallel import computed_for_all
from .samples import Interpolation, MeshBatches, MeshSamples, Sample, collate_samples, epoch_seed, make_sample
from .shards.reading import ShardedDataset, ShardedMeshes, load_shards
from .shards.writing import write_shards
from .synthetic.classes import shapes
from .synthetic.dataset import curved_figure, figure, figures
from .synthetic.pairs import figure_pairs
from .target_names import target_parts
from .targets import original_targets, standardized_targets, target_statistics, with_columns
from .variants import make_variants

__all__ = [
    "FEATURE_CHANNELS",
    "LAYOUTS",
    "UNLABELED",
    "ArrayStatistics",
    "DataError",
    "FeaturePart",
    "IndexedDataset",
    "IndexedMeshes",
    "Interpolation",
    "LabeledMesh",
    "LabeledMeshes",
    "LabelsAt",
    "Layout",
    "MeshBatches",
    "MeshPairs",
    "MeshSamples",
    "PairErrors",
    "PairSample",
    "PairShape",
    "PairedMeshes",
    "Preprocessing",
    "Sample",
    "ShardedDataset",
    "ShardedMeshes",
    "Statistics",
    "TargetsAt",
    "Truth",
    "Variants",
    "array_statistics",
    "augmented",
    "available_cores",
    "canonical_features",
    "check_statistics",
    "check_target_statistics",
    "chosen_classes",
    "collate_pairs",
    "collate_samples",
    "computed_for_all",
    "curved_figure",
    "decimated",
    "decimated_to_score",
    "epoch_seed",
    "feature_channels",
    "feature_parts",
    "figure",
    "figure_pairs",
    "figures",
    "fill_cache",
    "index_classes",
    "index_dataset",
    "index_targets",
    "input_features",
    "interpolation_weights",
    "labels_at",
    "load_classes",
    "load_dataset",
    "load_meanwhile",
    "load_pairs",
    "load_shards",
    "load_targets",
    "make_sample",
    "make_variants",
    "original_targets",
    "own_arrays",
    "pair_errors",
    "paired_meshes",
    "precompute_all",
    "prepare",
    "rotate_vectors",
    "save_pairs",
    "shapes",
    "standardized_targets",
    "target_parts",
    "target_statistics",
    "transferred_labels",
    "vector_channels",
    "with_columns",
    "with_few_faces",
    "with_label_names",
    "with_labels_at",
    "without_classes",
    "write_shards",
]
