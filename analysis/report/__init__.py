"""Turns records into tables, figures and pages; runs no network."""
