from .export import export_network as export_network, exported_inputs as exported_inputs
from .inference.matching import (
    Matched as Matched,
    load_matching_network as load_matching_network,
    match_meshes as match_meshes,
)
from .inference.network_input import network_input as network_input
from .inference.predict import (
    predict_labels as predict_labels,
    predict_probabilities as predict_probabilities,
    predict_values as predict_values,
)
from .inference.scoring import run_evaluation as run_evaluation
from .options import TrainOptions as TrainOptions
from .run import run_training as run_training
from .tasks.task import MetadataError as MetadataError, NetworkInput as NetworkInput
from .tasks.teeth import teeth_scores as teeth_scores
