"""Prompts continued, one token at a time: the cache, the draw, the step and the loop around it."""
