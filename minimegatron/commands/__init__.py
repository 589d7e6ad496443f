"""What `minimegatron COMMAND` calls: a module a command, with a `main(argv)`; the table is in `minimegatron.cli`."""
