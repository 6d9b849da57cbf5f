from .arrays import array_statistics as array_statistics, own_arrays as own_arrays
from .augmentation import augmented as augmented
from .conversion import (
    chosen_classes as chosen_classes,
    labels_at as labels_at,
    original_targets as original_targets,
    standardized as standardized,
    standardized_conditions as standardized_conditions,
    standardized_targets as standardized_targets,
    target_statistics as target_statistics,
    with_columns as with_columns,
    with_label_names as with_label_names,
    with_labels_at as with_labels_at,
    without_classes as without_classes,
)
from .derived import (
    decimated as decimated,
    decimated_to_score as decimated_to_score,
    interpolation_weights as interpolation_weights,
    make_variants as make_variants,
    transferred_labels as transferred_labels,
    with_few_faces as with_few_faces,
)
from .feature_names import (
    FEATURE_CHANNELS as FEATURE_CHANNELS,
    ArrayStatistics as ArrayStatistics,
    FeaturePart as FeaturePart,
    Statistics as Statistics,
    canonical_features as canonical_features,
    check_statistics as check_statistics,
    check_target_statistics as check_target_statistics,
    column_names as column_names,
    feature_channels as feature_channels,
    feature_parts as feature_parts,
    target_parts as target_parts,
    vector_channels as vector_channels,
)
from .features import (
    available_cores as available_cores,
    fill_cache as fill_cache,
    input_features as input_features,
    load_meanwhile as load_meanwhile,
    precompute_all as precompute_all,
    prepare as prepare,
    rotate_vectors as rotate_vectors,
)
from .folders.indexed import IndexedDataset as IndexedDataset, IndexedMeshes as IndexedMeshes
from .folders.layouts import BODIES as BODIES, BODY_MAPS as BODY_MAPS, LAYOUTS as LAYOUTS, Layout as Layout
from .folders.sets import (
    index_classes as index_classes,
    index_dataset as index_dataset,
    index_targets as index_targets,
    load_classes as load_classes,
    load_dataset as load_dataset,
    load_targets as load_targets,
)
from .labeled import (
    UNLABELED as UNLABELED,
    DataError as DataError,
    LabeledMesh as LabeledMesh,
    LabeledMeshes as LabeledMeshes,
    LabelsAt as LabelsAt,
    TargetsAt as TargetsAt,
)
from .options import Preprocessing as Preprocessing, Variants as Variants
from .pairs.folders import load_pairs as load_pairs
from .pairs.samples import (
    PairedMeshes as PairedMeshes,
    PairSample as PairSample,
    collate_pairs as collate_pairs,
    paired_meshes as paired_meshes,
)
from .pairs.scoring import PairErrors as PairErrors, pair_errors as pair_errors
from .pairs.shapes import MeshPairs as MeshPairs, PairShape as PairShape, Truth as Truth
from .samples import (
    Interpolation as Interpolation,
    MeshBatches as MeshBatches,
    MeshSamples as MeshSamples,
    Sample as Sample,
    collate_samples as collate_samples,
    epoch_seed as epoch_seed,
    make_sample as make_sample,
    output_rows as output_rows,
)
from .shapes import shapes as shapes
from .shards.reading import ShardedDataset as ShardedDataset, ShardedMeshes as ShardedMeshes, load_shards as load_shards
from .shards.writing import write_shards as write_shards
