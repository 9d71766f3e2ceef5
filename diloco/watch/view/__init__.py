"""The content of a run's folder, as rows for a page and as values for JSON."""
