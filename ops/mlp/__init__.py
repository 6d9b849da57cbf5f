"""Multilayer perceptrons on several inputs."""
