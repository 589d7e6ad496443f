"""Mixture of experts: router, dispatch, experts, balance and placement."""
