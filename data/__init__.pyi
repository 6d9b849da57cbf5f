from .features import available_cores, fill_cache, input_features, load_meanwhile, precompute_all, prepare
from .folders.layouts import LAYOUTS, Layout, load_dataset
from .generated.dataset import figure, figures
from .labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes, LabelsAt
from .options import FEATURE_CHANNELS, FeatureKind, Preprocessing
from .samples import MeshBatches, Sample, collate_samples, epoch_seed, make_sample

__all__ = [
    "FEATURE_CHANNELS",
    "LAYOUTS",
    "UNLABELED",
    "DataError",
    "FeatureKind",
    "LabeledMesh",
    "LabeledMeshes",
    "LabelsAt",
    "Layout",
    "MeshBatches",
    "Preprocessing",
    "Sample",
    "available_cores",
    "collate_samples",
    "epoch_seed",
    "figure",
    "figures",
    "fill_cache",
    "input_features",
    "load_dataset",
    "load_meanwhile",
    "make_sample",
    "precompute_all",
    "prepare",
]
