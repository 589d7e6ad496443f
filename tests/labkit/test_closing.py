"""Modules that an exercise asks for are closed: under every way to import them, and as files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from labkit import closing

MODULE = "minimegatron.parallel.pipeline.schedules"


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MODULE` is closed, which was imported before; afterwards all is as it was."""
    here = importlib.import_module(MODULE)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, MODULE, here)
    monkeypatch.setattr("minimegatron.parallel.pipeline.schedules", here)
    closing.close([MODULE])


@pytest.mark.usefixtures("closed")
def test_a_closed_module_cannot_be_imported_though_it_was_before() -> None:
    for ways in (
        lambda: importlib.import_module(MODULE),
        lambda: __import__(MODULE, fromlist=["zb_h1"]),
        lambda: exec("import minimegatron.parallel.pipeline.schedules as z", {}),
        lambda: exec("from minimegatron.parallel.pipeline import schedules", {}),
    ):
        with pytest.raises(ImportError, match="schedules` is closed in this exercise"):
            ways()
    assert importlib.import_module("minimegatron.parallel.pipeline.actions").Action("F", 0)


def test_its_files_are_its_source_and_what_was_compiled_from_it() -> None:
    source, compiled = closing.files_of([MODULE])
    assert source == Path(str(importlib.import_module(MODULE).__file__))
    assert compiled.name.startswith("schedules.") and compiled.suffix == ".pyc"


def test_nothing_is_closed_where_nothing_is_asked_for() -> None:
    finders = list(sys.meta_path)
    closing.close([])
    assert sys.meta_path == finders and closing.files_of([]) == []


def test_a_package_is_closed_with_all_that_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("minimegatron.viz.timeline")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.startswith("minimegatron.viz")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    monkeypatch.setattr("minimegatron.viz", importlib.import_module("minimegatron.viz"))
    closing.close(["minimegatron.viz"])
    for name in ("minimegatron.viz", "minimegatron.viz.timeline"):
        with pytest.raises(ImportError, match=r"minimegatron\.viz` is closed in this exercise"):
            importlib.import_module(name)
    [folder] = closing.files_of(["minimegatron.viz"])
    assert folder.is_dir() and (folder / "timeline.py").exists()


def test_what_is_loaded_after_names_were_remembered_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_NAMES", [])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = importlib.import_module("json")
    closing.remember()
    assert closing._loaded(["json"]) == [name for name in sys.modules if name.split(".")[0] == "json"]
    assert closing._loaded(["jso", "j.on", ".*"]) == [], "names, and no patterns"
    sys.modules["json.later"] = before
    assert "json.later" in closing._loaded(["json"])
    closing.close(["json.later"])
    assert "json.later" not in sys.modules and "json" in sys.modules
