"""The network and the preprocessing of the original implementation, as peers."""
