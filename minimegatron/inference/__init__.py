"""Prompts continued, one token at a time.

| file           | one idea                                                                                |
|----------------|-----------------------------------------------------------------------------------------|
| `static_cache` | what layers keep of all tokens so far, in memory of a fixed size                        |
| `sampling`     | from logits to a token, and its log-probability                                         |
| `generate`     | which models can generate; the decode step, which a CUDA graph can hold; the loop       |

The forward pass is the model's own, with an `InferenceContext`: layers say what they keep of earlier tokens, write it
and read it (`layers/inference_context.py`).
"""
