"""Prompts continued, one token at a time.

| file           | one idea                                                                    |
|----------------|-----------------------------------------------------------------------------|
| `static_cache` | keys and values of all tokens so far, in memory of a fixed size             |
| `model`        | one forward pass that remembers; which models can                           |
| `sampling`     | from logits to a word, and how likely it was                                |
| `decode`       | one token of every sequence, as a step that a CUDA graph can hold           |
| `generate`     | the loop: prefill, decode, stop                                             |

Layers know of it what `layers.attention.Remembered` says: where what they made of new tokens goes, and what comes back.
"""
