"""Runs that are compared, tensor by tensor: the room of `minimegatron compare`.

The problem in a sentence: a run on eight ranks learns worse than it should, its loss is plausible, and the mistake is
one sum among thousands.

| file          | one idea                                                                                      |
|---------------|-----------------------------------------------------------------------------------------------|
| `first_batch` | a run of the first batch, of which each rank keeps every tensor                               |
| `distance`    | how far two tensors are from each other, and how far is normal                                |
| `findings`    | what the ranks have found, put together                                                       |
| `twin`        | a layout beside its serial twin                                                               |
| `twin_parts`  | which part of a tensor of the twin a rank has                                                 |
| `flags`       | two runs in one layout, with other flags                                                      |
| `twice`       | the same steps twice, bit by bit                                                              |
| `verdict`     | the first difference in words: what, where, and where to look                                 |

What a run computes is seen by `training/probe`.
"""
