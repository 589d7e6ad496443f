"""Layers with a recurrent state in place of attention.

| module            | contents                                                                              |
|-------------------|---------------------------------------------------------------------------------------|
| `mixer`           | Mamba-2                                                                               |
| `scan`            | its recurrence, chunk by chunk                                                        |
| `gated_delta_net` | Gated DeltaNet                                                                        |
| `delta_rule`      | its recurrence, chunk by chunk                                                        |
| `convolution`     | the causal convolution before both                                                    |
| `pieces`          | both over a sequence that is cut over cp: states pass from piece to piece             |
"""
