"""Weights outside a run: names, shapes and conversions."""
