"""Short names of the fields of `ParallelConfig` that say how large an axis is."""

from __future__ import annotations

TP, CP, PP = "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
SP, VP = "sequence_parallel", "num_virtual_stages_per_pipeline_rank"
