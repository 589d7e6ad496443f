"""Data parallelism: DDP, the stages of ZeRO, and torch's FSDP2."""
