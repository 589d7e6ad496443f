"""`python -m minimegatron ...` is `minimegatron ...`; torchrun starts ranks with `-m minimegatron train ...`."""

import sys

from minimegatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
