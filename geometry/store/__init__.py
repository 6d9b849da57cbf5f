"""Results of preprocessing as files, in memory and on a GPU: one form of entries for all of them."""
