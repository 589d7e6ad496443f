"""The grid of ranks, and the collectives and messages between them."""
