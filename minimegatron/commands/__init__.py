"""The commands of `minimegatron COMMAND`: each a module with a `main(argv)`; the table is in `minimegatron.cli`."""
