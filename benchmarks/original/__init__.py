"""The network and the preprocessing of the original implementation, written plainly, as peers."""
