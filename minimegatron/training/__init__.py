"""The training loop: one step, the trainer around it, Megatron's command line in front of it."""
