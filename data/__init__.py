"""Data sets: generated ones, data sets on disk, and packed batches of preprocessed samples."""

from diffnet.data.features import (
    FEATURE_CHANNELS,
    FeatureKind,
    Preprocessing,
    fill_cache,
    input_features,
    prepare,
)
from diffnet.data.figures.dataset import figures
from diffnet.data.folders.layouts import LAYOUTS, Layout, load_dataset
from diffnet.data.labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes, LabelsAt
from diffnet.data.samples import MeshBatches, Sample, collate_samples, epoch_seed, make_sample
from diffnet.geometry.preprocessing.many import load_meanwhile, precompute_all
from diffnet.geometry.processes import available_cores

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
    "figures",
    "fill_cache",
    "input_features",
    "load_dataset",
    "load_meanwhile",
    "make_sample",
    "precompute_all",
    "prepare",
]
