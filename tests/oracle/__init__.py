"""Scripts that ask Megatron-Core 0.16.1, running on a CPU, what the right answer is.

They need `pip install --no-deps megatron-core==0.16.1` and a few of its dependencies; the tests do not: they read what
these scripts froze into `tests/golden/`. `python -m tests.oracle.regenerate --help` is the way in.
"""
