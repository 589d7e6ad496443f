"""A notebook in a real JupyterLab in a real Chromium: open it, run all cells, look at it.

    python -m tests.notebooks.browser labs/01_process_groups.ipynb PICTURES/01

nbval proves the text of the outputs; only a browser shows that a table is readable, a figure is there, and no widget
says "could not load". The notebook is copied first, with its folder, so nothing of the repository changes. Pictures are
taken a screen at a time: `PICTURES/01-1.png`, `-2.png` ...

Needs the packages `jupyterlab` and `playwright`, and a Chromium of the system (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120
WIDTH, HEIGHT = 1280, 1500
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
NOTEBOOK = "window.jupyterapp.shell.currentWidget"
KERNEL = f"{NOTEBOOK}.sessionContext.session.kernel"
IN_VIEW = f"""() => [...document.querySelectorAll('.jp-Notebook .jp-Cell')].some(
    cell => {{ const box = cell.getBoundingClientRect(); return box.bottom > 80 && box.top < {HEIGHT} - 40 }})"""


class Visit(NamedTuple):
    """What was seen.

    Attributes:
        outputs: by code cell, the kinds of its outputs ("stream", "execute_result", "error: ValueError" ...).
        pictures: files, from top to bottom.
        page_errors: what the page itself complained about.
        outside: addresses other than this machine's that the page asked for.
        panel: what the first code cell shows when all have run.
    """

    outputs: list[list[str]]
    pictures: list[Path]
    page_errors: list[str]
    outside: list[str]
    panel: str


def missing() -> str:
    """What this machine lacks to do it; "" when nothing."""
    for module in ("jupyterlab", "playwright"):
        try:
            __import__(module)
        except ImportError:
            return f"the package {module} is not installed"
    return "" if chromium() else "there is no Chromium on this machine (Debian: apt-get install chromium)"


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def visit(notebook: Path, pictures: Path, seconds: float = 300.0) -> Visit:
    """Run all cells of a notebook and take pictures of it.

    Args:
        notebook: not changed; a copy of its folder is visited.
        pictures: where they go, with `-1.png`, `-2.png` ... put behind.
        seconds: for all cells together.
    Raises:
        RuntimeError: the server ended, or something did not come in time; with the end of the server's log.
    """
    with tempfile.TemporaryDirectory(prefix="minimegatron-browser-") as scratch:
        folder = Path(scratch) / "notebooks"
        shutil.copytree(notebook.resolve().parent, folder, ignore=shutil.ignore_patterns(".work", ".ipynb_checkpoints"))
        with _jupyterlab(Path(scratch), folder) as address:
            return _look(f"{address[0]}/lab/tree/{notebook.name}?token={address[1]}", Path(scratch), pictures, seconds)


@contextlib.contextmanager
def _jupyterlab(scratch: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """A server of our own: loopback, a token, no settings of the user's, no news. Gives (address, token)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    settings = scratch / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    places = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
    }  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **{name: str(scratch / place) for name, place in places.items()}}
    command = [
        sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0",
        "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with open(scratch / "server.log", "w") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_for_port(port, server, scratch / "server.log")
        yield f"http://127.0.0.1:{port}", token
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(5)


def _wait_for_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


def _look(address: str, scratch: Path, pictures: Path, seconds: float) -> Visit:
    from playwright.sync_api import TimeoutError as TooLate
    from playwright.sync_api import sync_playwright

    errors: list[str] = []
    outside: list[str] = []
    ours = (address.split("/lab/")[0], "ws://127.0.0.1", "data:", "blob:")
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(scratch / "profile"), executable_path=chromium(), headless=True, timeout=START_SECONDS * 1000,
            viewport={"width": WIDTH, "height": HEIGHT}, args=FLAGS,
        )  # fmt: skip
        try:
            page = context.new_page()
            page.set_default_timeout(START_SECONDS * 1000)
            page.on("pageerror", lambda error: errors.append(str(error)[:200]))
            page.on("request", lambda r: None if r.url.startswith(ours) else outside.append(r.url[:120]))
            page.goto(address, wait_until="domcontentloaded")
            _run_all(page, seconds)
            outputs = page.evaluate(
                f"""() => {NOTEBOOK}.content.model.sharedModel.toJSON().cells.filter(c => c.cell_type == 'code')
                    .map(c => c.outputs.map(o => o.output_type + (o.ename ? ': ' + o.ename : '')))"""
            )
            taken = _pictures(page, pictures, panel := [])
            return Visit(outputs, taken, errors, outside, "".join(panel))
        except TooLate as error:
            log = (scratch / "server.log").read_text()[-3000:]
            raise RuntimeError(f"not in time: {error}\n{log}") from None
        finally:
            context.close()


def _run_all(page: Any, seconds: float) -> None:
    # JupyterLab exposes its application on request: run the real command, not a key chord.
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('notebook:run-all-cells')")
    page.wait_for_function(f"() => {NOTEBOOK}?.sessionContext?.session?.kernel?.status === 'idle'")
    page.evaluate(
        """() => { window.ranAll = false;
            window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => window.ranAll = true) }"""
    )
    page.wait_for_function(f"() => window.ranAll && {KERNEL}.status === 'idle'", timeout=seconds * 1000)


def _pictures(page: Any, stem: Path, panel: list[str]) -> list[Path]:
    """The notebook from top to bottom, one screen at a time: JupyterLab draws only the cells in view.

    The first screen's first output goes to `panel`.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area').catch(() => null)")
    scroller = f"{NOTEBOOK}.content.outerNode ?? {NOTEBOOK}.content.node"
    page.evaluate(f"() => {{ {NOTEBOOK}.content.activeCellIndex = 0; ({scroller}).scrollTop = 0 }}")
    taken: list[Path] = []
    while len(taken) < 60:
        page.wait_for_timeout(800)
        if not page.evaluate(IN_VIEW):
            break
        if not taken:
            panel += page.locator(".jp-Notebook .jp-OutputArea-output").first.all_inner_texts()
        taken.append(stem.with_name(f"{stem.name}-{len(taken) + 1}.png"))
        page.screenshot(path=str(taken[-1]))
        moved = page.evaluate(
            f"() => {{ const s = {scroller}; const old = s.scrollTop; s.scrollTop += s.clientHeight - 60; "
            "return s.scrollTop > old + 1 }"
        )
        if not moved:
            break
    return taken


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.notebooks.browser", description="Run a notebook in a browser.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("pictures", type=Path, help="where to; -1.png, -2.png ... is put behind")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all cells")
    options = parser.parse_args()
    if lack := missing():
        print(f"skipped: {lack}")
        return 0
    seen = visit(options.notebook, options.pictures, options.seconds)
    failed = [kind for cell in seen.outputs for kind in cell if kind.startswith("error")]
    print(f"{len(seen.outputs)} code cells, {len(seen.pictures)} pictures, errors in cells: {failed or 'none'}, "
          f"of the page: {seen.page_errors or 'none'}, requests to the outside: {seen.outside or 'none'}")  # fmt: skip
    return 1 if failed or seen.page_errors or seen.outside else 0


if __name__ == "__main__":
    sys.exit(main())
