"""Checkpoints of a run; models of Hugging Face, Megatron-LM and TensorRT-LLM, read and written."""
