"""Benchmarks of the update: run from the checkout with ``python -m bench``."""
