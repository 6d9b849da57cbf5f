"""Reports, pictures and pages of results."""
