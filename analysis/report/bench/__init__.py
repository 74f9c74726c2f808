"""Pages of benchmark runs."""
