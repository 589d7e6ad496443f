"""Prompts continued, one token at a time.

| file           | one idea                                                                    |
|----------------|-----------------------------------------------------------------------------|
| `static_cache` | what layers keep of all tokens so far, in memory of a fixed size            |
| `checks`       | which models can generate here                                              |
| `sampling`     | from logits to a word, and how likely it was                                |
| `decode`       | one token of every sequence, as a step that a CUDA graph can hold           |
| `generate`     | the loop: prefill, decode, stop                                             |

The forward pass is the model's own, with an `InferenceContext`: layers say what they keep of earlier tokens, write it
and read it (`layers/inference_context.py`).
"""
