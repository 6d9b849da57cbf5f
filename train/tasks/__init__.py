"""The tasks that a network can learn, with their losses, scores and reports. `registry.py` lists them."""
