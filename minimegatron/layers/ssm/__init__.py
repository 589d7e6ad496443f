"""State-space layers: Mamba-2."""
