"""FP8: products of quantised tensors, their scales, and linear layers that use them."""
