from .export import export_network, exported_inputs
from .inference.matching import Matched, load_matching_network, match_meshes
from .inference.network_input import network_input
from .inference.predict import predict_labels, predict_probabilities, predict_values
from .inference.scoring import run_evaluation
from .options import TrainOptions
from .run import run_training
from .tasks.segmentation import write_predictions
from .tasks.task import MetadataError, NetworkInput

__all__ = [
    "Matched",
    "MetadataError",
    "NetworkInput",
    "TrainOptions",
    "export_network",
    "exported_inputs",
    "load_matching_network",
    "match_meshes",
    "network_input",
    "predict_labels",
    "predict_probabilities",
    "predict_values",
    "run_evaluation",
    "run_training",
    "write_predictions",
]
