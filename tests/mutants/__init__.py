"""Mistakes planted in the package's source, each with the tests that must notice it.

A test says something only if it fails without the code that it is about. `table.py` lists changes of single lines:
another stream, another axis, a call left out. `python -m tests.mutants.run` makes them one at a time in a copy of the
project, runs the tests named beside each, and prints which mistakes nobody noticed and the score. `make thorough` runs
all of them; every `make test` checks that each line of the table is still found in the source.
"""
