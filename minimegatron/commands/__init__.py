"""The commands of `minimegatron COMMAND`: modules with a `main(argv)`, in the table of `minimegatron.cli`."""
