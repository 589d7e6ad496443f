"""Each of twenty faults in a run: the commands of docs/debugging.md print what the page says, the rank and the place.

The page is the table: a heading is the fault, its block has the commands and the lines that they print. Times, hashes
and the numbers of calls, which another machine has otherwise, are not compared; ranks, names, steps and samples are.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from labkit.ranks.torchrun import launch
from minimegatron import cli
from minimegatron.commands import compare
from minimegatron.training.arguments import parse_args
from tests.faults import helpers, twenty

PAGE = helpers.PACKAGE / "docs" / "debugging.md"
PROGRAM = helpers.VICTIM.with_name("twenty.py")
_BLOCK = re.compile(r"^### \d+\. (?P<fault>.*?)\n(?:(?!^### ).*\n)*?```console\n(?P<lines>(?:.*\n)*?)```", re.MULTILINE)
_OTHERWISE = re.compile(
    r"bits [0-9a-f]{16}|(?<=[:] )[0-9a-f]{16}\b|-?\d+\.\d+(e[+-]\d+)?|\de[+-]\d\d"  # hashes, numbers
    r"|#\d+|\.py:\d+|in \d+ of \d+ steps|on \S+ in"  # calls, lines, how often, machines
)


def blocks() -> dict[str, list[tuple[str, list[str]]]]:
    """Fault -> (command, lines that it prints)."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    tiny = re.search(r'^TINY="(.*?)"$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert tiny
    for match in _BLOCK.finditer(PAGE.read_text()):
        commands = found.setdefault(match["fault"], [])
        for line in match["lines"].splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            elif line.startswith("> "):
                commands[-1] = (commands[-1][0].removesuffix("\\") + line[2:], [])
            elif line != "...":
                commands[-1][1].append(line)
        found[match["fault"]] = [
            (command.replace("$TINY", tiny[1].replace("\\\n", "")), lines) for command, lines in commands
        ]
    return found


def plain(text: str) -> str:
    """A line without what every machine has otherwise."""
    return _OTHERWISE.sub("#", text)


def test_the_page_has_every_fault_and_its_commands_are_commands() -> None:
    found = blocks()
    assert list(found) == list(twenty.FAULTS)
    for commands in found.values():
        assert commands and commands[-1][1]
        for command, _ in commands:
            ranks, words = ranks_of(command)
            if words[0] == "train":
                parse_args(words[1:], ranks)
            assert words[0] in cli.COMMANDS


def ranks_of(command: str) -> tuple[int, list[str]]:
    """How many ranks a command line starts, and the words behind `minimegatron`."""
    words = shlex.split(command)
    if "torchrun" in words[:2]:
        return int(words[words.index("--nproc-per-node") + 1]), words[words.index("-m") + 2 :]
    assert words[0] == "minimegatron", command
    if words[1] != "compare":
        return 1, words[1:]
    own, flags, _ = compare.parse(words[2:])
    return own.ranks or compare.fewest_ranks(flags), words[1:]


@pytest.mark.thorough
@pytest.mark.parametrize("fault", list(twenty.FAULTS))
def test_a_user_sees_the_rank_and_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, lines in blocks()[fault]:
        if "verify" in command:
            flip_a_bit(tmp_path)
        said = printed(command, fault, tmp_path, capfd)
        for line in lines:
            assert plain(line) in plain(said), f"{command}\nprints\n{said}"


def printed(command: str, fault: str, folder: Path, capfd: Any) -> str:
    """All that the ranks of a command print while the fault happens."""
    ranks, words = ranks_of(command)
    if words[0] not in ("train", "compare"):
        cli.main(words)
        return "".join(capfd.readouterr())
    run = launch(PROGRAM, ranks, folder / "ranks", timeout=90, args=[fault, *words])
    return "".join([*run.stdout, *run.stderr, run.agent_output, run.explain()])


def flip_a_bit(folder: Path) -> None:
    """Of the last number in the last rank's file."""
    *_, file = sorted(folder.rglob("shard-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
