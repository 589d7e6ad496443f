"""What wraps a module: data parallelism over gradient buckets, pipeline schedules and executors, the last sums."""
