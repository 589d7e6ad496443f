"""Prompts continued, one token at a time.

| file           | one idea                                                                    |
|----------------|-----------------------------------------------------------------------------|
| `static_cache` | keys and values of all tokens so far, in memory of a fixed size             |
| `model`        | one forward pass with a cache; which models can                           |
| `sampling`     | from logits to a word, and how likely it was                                |
| `decode`       | one token of every sequence, as a step that a CUDA graph can hold           |
| `generate`     | the loop: prefill, decode, stop                                             |

Layers know `layers.attention.KVCache` alone: its `update` stores keys and values of new tokens, and returns those to
attend to.
"""
