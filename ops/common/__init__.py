"""What all operations share: backends, dispatch, launching, matrix products, spans of rows."""
