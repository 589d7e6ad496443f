"""Generation: many requests at once, a step at a time, over a paged KV cache.

| file            | one idea                                                                                      |
|-----------------|-----------------------------------------------------------------------------------------------|
| `sequence`      | a request, and its sequences: the answers under way                                           |
| `block_manager` | which sequence holds which page; prefix caching                                               |
| `scheduler`     | which tokens of which sequences a step computes                                               |
| `paged_cache`   | the tensors: pages and slots of a rank's layers                                               |
| `sampling`      | from logits to a token and its log-probability                                                |
| `speculative`   | tokens proposed cheaply, verified in one pass                                                 |
| `grammar`       | which tokens a grammar, such as a JSON schema, allows next                                    |
| `plan`          | a step as plain numbers, the `Batch` that rank 0 sends to all ranks                           |
| `runner`        | a batch computed on one rank, over tp, pp and ep; as a CUDA graph                             |
| `results`       | from the logits of a batch to its tokens and log-probabilities                                |
| `engine`        | requests in, tokens out, a step at a time                                                     |
| `generate`      | what one caller asks of it: prompts continued, texts scored                                   |
| `loading`       | a published model or a checkpoint, as a model that generates                                  |
| `adapters`      | adapters of PEFT beside its layers, of which each request names one                           |
| `awq`           | a model rescaled before it is quantised                                                       |
| `refit`         | weights from a trainer's layout to an engine's                                                |
| `detokenizer`   | ids to text as they come; stop strings                                                        |

`sequence`, `block_manager` and `scheduler` are plain data: they import no torch and are tested without a model. The
forward pass is the model's own, given an `InferenceContext`: each layer says what it caches, writes it and reads it
(`layers/inference_context.py`).
"""
