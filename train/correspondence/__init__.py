"""Pairs of meshes in training and prediction: true functional maps, maps of points, and their scores."""
