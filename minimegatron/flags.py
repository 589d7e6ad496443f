"""The parser of every command: a mistake on a command line is an error like all others, not a page of usage."""

from __future__ import annotations

import argparse
from typing import NoReturn

from minimegatron.errors import ConfigError

LONGEST = 160  # letters of a usage that is short enough to be the fix


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError`: what was wrong, and the usage, or how to see it."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise ConfigError(message, fix=usage if len(usage) <= LONGEST else f"see {self.prog} --help")
