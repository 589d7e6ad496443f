"""What my module computes, as plainly as it can be said: one sequence, no layout, no state, torch alone."""

from __future__ import annotations


def reference(config, layer, weights, x):
    """One of my modules on one sequence.

    Args:
        config: the model's, a `TransformerConfig`.
        layer: number of the layer, from 0.
        weights: the module's parameters by the names that they have in it, whole.
        x: [s, h] in float64, what the module is given.

    Returns:
        [s, h], what it has to give.
    """
    raise NotImplementedError("a loop over tokens is plain")
