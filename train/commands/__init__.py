"""The commands of the command line. `train/cli.py` puts them together."""
