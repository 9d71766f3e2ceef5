"""What is known of a run from its folder, as rows for a page and as values for JSON."""
