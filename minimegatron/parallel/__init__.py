"""What wraps a module lives outside it: data parallelism, gradient buckets, and the last sums over gradients."""
