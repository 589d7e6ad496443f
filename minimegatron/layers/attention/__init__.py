"""Attention: its cores, masks, and how a sequence is shared over ranks."""
