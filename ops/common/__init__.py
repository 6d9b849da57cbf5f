"""Code that all operations share: backends, checks, dispatch, launching, matrix products, spans of rows."""
