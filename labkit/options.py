"""The options of `%%torchrun` and `%%ranks`."""

from __future__ import annotations

from argparse import ArgumentTypeError

from IPython.core.magic_arguments import MagicArgumentParser


def torchrun_options() -> MagicArgumentParser:
    """`-n`, `--gpus`, the common options, and the script's own arguments after `--`."""
    parser = _common("%%torchrun")
    parser.add_argument("-n", "--nproc", type=_count, help="number of ranks; default 2, with --gpus one for each GPU")
    gpus = "give each rank a GPU of its own; needs at least LEAST of them (default 1)"
    parser.add_argument("--gpus", nargs="?", type=_count, const=1, metavar="LEAST", help=gpus)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser


def ranks_options() -> MagicArgumentParser:
    """The number of ranks, and the common options."""
    parser = _common("%%ranks")
    parser.add_argument("nproc", type=_count, help="number of ranks")
    return parser


def _common(name: str) -> MagicArgumentParser:
    parser = MagicArgumentParser(name, add_help=False)
    parser.add_argument("--needs", default="", help="exercises, with commas between, that must have passed")
    parser.add_argument("--name", default="cell", help="name of the script that is kept")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds from the moment all ranks have started")
    out = "variable that gets the Run (%%ranks: what was reported, by rank); None where the cell waits"
    parser.add_argument("--out", default="", help=out)
    parser.add_argument("--expect-failure", action="store_true", help="print how it failed instead of raising")
    return parser


def _count(text: str) -> int:
    """A number of ranks or GPUs."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)
