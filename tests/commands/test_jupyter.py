import os

import pytest

from minimegatron.commands import jupyter
from minimegatron.errors import ConfigError


def test_only_this_machine_and_the_token_stays_on(tmp_path):
    command = jupyter.lab_command(tmp_path, 8890, browser=False, root=False)
    assert f"--ServerApp.root_dir={tmp_path}" in command and "--ServerApp.port=8890" in command
    assert "--ServerApp.ip=127.0.0.1" in command and "--no-browser" in command
    words = " ".join(command)
    for risk in ("token", "password", "allow_origin", "disable_check_xsrf", "allow-root", "0.0.0.0"):
        assert risk not in words


def test_the_browser_opens_only_where_there_is_a_display():
    assert "--no-browser" not in jupyter.lab_command(os.curdir, 8888, browser=True, root=False)
    assert jupyter.has_display({"DISPLAY": ":0"}) and jupyter.has_display({"WAYLAND_DISPLAY": "wayland-0"})
    if os.uname().sysname == "Linux":
        assert not jupyter.has_display({"DISPLAY": ""})


def test_a_container_is_known_by_its_marks(tmp_path):
    (tmp_path / "proc/1").mkdir(parents=True)
    first = tmp_path / "proc/1/comm"
    first.write_text("systemd\n")
    assert not jupyter.in_container({}, tmp_path)
    assert jupyter.in_container({"container": "podman"}, tmp_path)
    first.write_text("bash\n")
    assert jupyter.in_container({}, tmp_path)
    first.write_text("init\n")
    (tmp_path / ".dockerenv").touch()
    assert jupyter.in_container({}, tmp_path)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The command line that would have replaced this process."""
    calls = []
    monkeypatch.setattr(os, "execv", lambda path, argv: calls.append(argv))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.chdir(tmp_path)
    for name in ("labs", "course"):
        (tmp_path / name).mkdir()
    return calls


def test_root_on_a_real_machine_is_refused_unless_told(started, monkeypatch):
    monkeypatch.setattr(jupyter, "in_container", lambda environ: False)
    with pytest.raises(ConfigError, match="root"):
        jupyter.main([])
    assert not started
    jupyter.main(["--allow-root"])
    assert "--allow-root" in started[0]


def test_copies_of_the_labs_here_are_served(started, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jupyter, "in_container", lambda environ: True)
    jupyter.main(["--port", "9000", "--no-browser"])
    assert f"--ServerApp.root_dir={tmp_path / 'my-labs'}" in started[0] and "--ServerApp.port=9000" in started[0]
    assert capsys.readouterr().out.splitlines()[0] == "your labs are in my-labs/: copies, yours to change"
    jupyter.main(["labs"])
    assert f"--ServerApp.root_dir={tmp_path / 'labs'}" in started[1], "a folder that is named is opened as it is"
    with pytest.raises(ConfigError, match="no folder nowhere"):
        jupyter.main(["nowhere"])
