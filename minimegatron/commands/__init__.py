"""The commands of `minimegatron COMMAND`: each a module with a `main(argv)`, in the table of `minimegatron.cli`."""
