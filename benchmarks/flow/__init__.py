"""Bodies of several components in a potential flow: a set with a computed truth, and networks that learn it."""
