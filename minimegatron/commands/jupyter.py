"""`minimegatron lab`: JupyterLab on the learner's copies of the labs, reachable from this machine only.

Without a folder it copies the labs to `my-labs/` (`my_labs`) and opens that; a folder that is named is opened as it is.
`--copy-only` ends after the copy, where JupyterLab runs already (JupyterHub, a hosted notebook).

It listens on 127.0.0.1 with its token on, opens a browser when there is a display and prints its address otherwise. It
refuses to run as root outside a container, where every cell of a notebook could change the whole machine;
`--allow-root` overrules.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from minimegatron.commands import installed, my_labs
from minimegatron.errors import ConfigError
from minimegatron.flags import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by JupyterLab.

    Raises:
        ConfigError: the folder does not exist or cannot be written, JupyterLab is not installed, or we are root on a
            real machine.
    """
    parser = Parser("minimegatron lab", description="open JupyterLab on the labs")
    parser.add_argument("folder", nargs="?", type=Path, help="default: my-labs/, with your copies of the labs")
    parser.add_argument("--language", help="of the labs' prose and hints, en or zh; default: as the last time")
    parser.add_argument("--port", type=int, default=8888, help="the first free one from here on (default 8888)")
    parser.add_argument("--copy-only", action="store_true", help="make or update the copies, and end")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--allow-root", action="store_true", help="run as root although this is not a container")
    args = parser.parse_args(argv)
    shipped, home = installed.places()
    folder = args.folder or shipped
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", fix="name the folder of notebooks: minimegatron lab FOLDER")
    if args.folder and (args.language or args.copy_only):
        raise ConfigError(
            "--language and --copy-only are of your copies, and a folder is named", fix="leave FOLDER out"
        )
    if args.copy_only:
        folder, said = my_labs.bring(shipped, args.language, home)
        print("".join(f"{line}\n" for line in said) + f"{folder}: {len(list(folder.glob('*.ipynb')))} notebooks")
        return 0
    if importlib.util.find_spec("jupyterlab") is None:
        raise ConfigError("JupyterLab is not installed", fix=installed.to_add("lab", "lab"))
    root = os.getuid() == 0
    if root and not args.allow_root and not in_container(os.environ):
        raise ConfigError("this is root, and not in a container", fix="use an ordinary account, or add --allow-root")
    if not args.folder:
        folder, said = my_labs.bring(shipped, args.language, home)
        print("".join(f"{line}\n" for line in said), end="")
        os.environ[my_labs.SAID_IN] = my_labs.language_of(folder)
    browser = has_display(os.environ) and not args.no_browser
    os.environ["JUPYTER_CONFIG_PATH"] = config_path(os.environ)
    command = lab_command(folder.resolve(), args.port, browser=browser, root=root)
    print(f"$ {' '.join(command)}", flush=True)
    os.execv(command[0], command)


def lab_command(folder: Path, port: int, *, browser: bool, root: bool) -> list[str]:
    """The command line that starts JupyterLab: this machine only, the token left on."""
    where = [f"--ServerApp.root_dir={folder}", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    options = [*([] if browser else ["--no-browser"]), *(["--allow-root"] if root else [])]
    return [sys.executable, "-m", "jupyterlab", *where, *options]


def config_path(environ: Mapping[str, str]) -> str:
    """Where JupyterLab looks for settings first: `labconfig/` here turns off its question whether to fetch news."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent), environ.get("JUPYTER_CONFIG_PATH")]))


def has_display(environ: Mapping[str, str]) -> bool:
    """Whether a browser could show itself."""
    return sys.platform == "darwin" or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def in_container(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether this is a container: its runtime left a mark, or process 1 is no init system."""
    if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")):
        return True
    if environ.get("container") or environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    try:
        first = (root / "proc/1/comm").read_text().strip()
    except OSError:
        return False
    return first not in ("systemd", "init", "launchd", "runit", "openrc-init")
