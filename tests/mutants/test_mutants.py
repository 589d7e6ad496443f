"""Every mistake of the table can still be planted, and is noticed."""

from __future__ import annotations

import pytest

from tests.mutants.run import PROJECT, copy_of_the_project, planted, run_tests, survives
from tests.mutants.table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_table_fits_the_source(mutant):
    text = (PROJECT / mutant.file).read_text()
    assert planted(mutant, text) != text
    if mutant.file.endswith(".py"):
        compile(planted(mutant, text), mutant.file, "exec")
    for test in mutant.tests.split():
        if test.startswith("tests/"):
            file, _, name = test.partition("::")
            assert (PROJECT / file).exists(), test
            assert not name or f"def {name.partition('[')[0]}(" in (PROJECT / file).read_text(), test


def test_names_are_used_once():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


@pytest.fixture(scope="module")
def folder():
    with copy_of_the_project() as folder:
        yield folder


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_is_noticed(mutant, folder):
    assert not survives(mutant, folder), f"{mutant.tests} passes with {mutant.after!r} in {mutant.file}"


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_what_changes_nothing_survives(folder):
    """The runner itself: a space is no mistake, and the tests pass in the copy."""
    harmless = MUTANTS[0]._replace(after=MUTANTS[0].before + " ")
    assert survives(harmless, folder)
    assert run_tests(MUTANTS[0].tests, folder) == 0
