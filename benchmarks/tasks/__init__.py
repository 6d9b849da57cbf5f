"""Measurements of whole tasks, such as the accuracy after training. Each module is a program."""
