"""In which folder labs are found and copies are made: in a checkout, in another one, and from a wheel."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from minimegatron.commands import installed, jupyter, my_labs
from minimegatron.errors import ConfigError
from tests.commands.test_my_labs import NAME, cells, in_two_languages


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages as a wheel leaves it: a lab, and its Chinese."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    in_two_languages(packages)
    (packages / "labs").rename(packages / "course" / "labs")
    return packages


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands are called."""
    folder = tmp_path / "learner"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_wheel_s_labs_are_copied_to_where_the_command_is_called(
    site: Path, learner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(site.rglob("*"))
    (learner / "labs").mkdir()  # not ours: there is no course beside it
    assert installed.from_wheel(site) and installed.places(site) == (site / "course" / "labs", learner)
    labs, home = installed.places(site)
    folder, said = my_labs.bring(labs, "zh", home)
    assert folder == learner / my_labs.FOLDER and said == ["your labs are in my-labs/: copies, yours to change"]
    assert cells(folder / NAME) == ["# 一", "1"] and my_labs.language_of(folder) == "zh"
    my_labs.bring(labs, "en", home)
    assert cells(folder / NAME) == ["# One", "1"] and sorted(site.rglob("*")) == before
    monkeypatch.chdir(folder)
    assert installed.places(site) == (labs, learner), "no copies among the copies"


def test_a_checkout_is_taken_before_what_came_with_the_package(site: Path, learner: Path) -> None:
    for name in ("labs", "course"):
        (learner / name).mkdir()
    assert installed.places(site) == (learner / "labs", learner)


def test_an_editable_package_keeps_copies_in_its_checkout(tmp_path: Path, learner: Path) -> None:
    (tmp_path / "checkout" / "labs").mkdir(parents=True)
    assert installed.places(tmp_path / "checkout") == (tmp_path / "checkout" / "labs", tmp_path / "checkout")
    assert not installed.from_wheel(), "these tests run in a checkout"


def test_only_the_copies(site: Path, learner: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(installed, "places", lambda: installed.Places(site / "course" / "labs", learner))
    monkeypatch.setattr(jupyter.importlib.util, "find_spec", lambda name: None)
    assert jupyter.main(["--copy-only"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{learner / 'my-labs'}: 1 notebooks"
    with pytest.raises(ConfigError, match="a folder is named"):
        jupyter.main(["--copy-only", str(learner)])
    with pytest.raises(ConfigError, match="JupyterLab is not installed") as caught:
        jupyter.main([])
    assert caught.value.fix == "make lab, or pip install -e '.[lab]' -c constraints.txt"


@pytest.mark.parametrize("quote", ["'", '"'])
def test_packages_of_an_extra_are_named_where_there_is_no_makefile(monkeypatch: pytest.MonkeyPatch, quote: str) -> None:
    monkeypatch.setattr(installed, "from_wheel", lambda: True)
    lines = ["torch>=2.11", *(f"{name}; extra == {quote}lab{quote}" for name in ("jupyterlab", "pillow"))]
    lines += [f"fastapi; extra == {quote}serve{quote}"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert installed.to_add("lab", "lab") == "pip install jupyterlab pillow"


def test_jupyterlab_does_not_ask_whether_to_fetch_news(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("jupyterlab_server.config")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", jupyter.config_path({"JUPYTER_CONFIG_PATH": "another"}))
    assert jupyter.config_path({"JUPYTER_CONFIG_PATH": "another"}).endswith(":another")
    off = config.get_static_page_config(level="all")["disabledExtensions"]
    assert off["@jupyterlab/apputils-extension:announcements"] is True
