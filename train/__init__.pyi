from .network_input import MetadataError, NetworkInput, network_input
from .options import TrainOptions
from .predict import predict_labels, write_predictions
from .run import run_segmentation

__all__ = [
    "MetadataError",
    "NetworkInput",
    "TrainOptions",
    "network_input",
    "predict_labels",
    "run_segmentation",
    "write_predictions",
]
