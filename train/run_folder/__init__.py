"""Files in the folder of a run: its lock, its table and its events for TensorBoard."""
