"""Models composed from a spec of their layers, and known families as data."""
