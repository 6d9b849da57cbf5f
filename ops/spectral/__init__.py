"""Projection onto an eigenbasis, evaluation in it, and heat diffusion in it."""
