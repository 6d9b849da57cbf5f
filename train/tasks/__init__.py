"""Tasks: what a network learns, how its outputs are scored and what is written. `registry.py` lists them."""
