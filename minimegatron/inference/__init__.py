"""Prompts continued: many requests at once, a step at a time, in memory made of pages.

| file            | one idea                                                                              |
|-----------------|---------------------------------------------------------------------------------------|
| `sequence`      | a request, and the sequences that answer it                                           |
| `block_manager` | who has which page; pages found again by their tokens                                 |
| `scheduler`     | which tokens of which sequences a step computes                                       |
| `paged_cache`   | the pages and slots of a rank's layers                                                |
| `sampling`      | from logits to a token, and its log-probability                                       |
| `speculative`   | tokens proposed cheaply, verified in one pass                                         |
| `grammar`       | which tokens a JSON schema lets come next                                             |
| `plan`          | a step in plain numbers, which rank 0 sends to all ranks                              |
| `results`       | from the logits of a step to its tokens and log-probabilities                         |
| `runner`        | a step on one rank, over tp, pp and ep; a step that a CUDA graph can hold             |
| `engine`        | requests in, tokens out                                                               |
| `generate`      | prompts in, continuations out                                                         |
| `loading`       | a published model or a checkpoint, as a model that generates                          |
| `refit`         | weights from a trainer's layout to an engine's                                        |
| `packed`        | quantised weights that stay packed in memory                                          |
| `detokenizer`   | ids to text while they come; stop strings                                             |

The first three are plain data: they import no tensor and are tested without a model. The forward pass is the model's
own, with an `InferenceContext`: layers say what they keep of earlier tokens, write it and read it
(`layers/inference_context.py`).
"""
