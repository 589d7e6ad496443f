"""Layers that are sharded over ranks inside: tensor, sequence, context and expert parallelism."""
