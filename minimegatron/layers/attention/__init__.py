"""Attention: cores, masks, multi-latent attention, and context parallelism."""
