"""Trained networks on new meshes: their input, predictions and scores."""
