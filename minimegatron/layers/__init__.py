"""What shards a layer lives inside the layer: tensor, sequence, context and expert parallelism."""
