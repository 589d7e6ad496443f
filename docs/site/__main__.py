"""The website by one command: `python -m docs.site [FOLDER]`, which is `make site`.

Pages are written into FOLDER/source (build/site), and Sphinx builds FOLDER/html from them. A warning of Sphinx is an
error, and so is a broken link or a page that would ask another machine for something (`docs/site/links`).
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from docs.site import links, pages

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Build the site. Returns the exit status: 0, or 1 where something is wrong with it."""
    try:
        from sphinx.cmd.build import build_main
    except ImportError:
        print("Sphinx is not installed\n  fix: make site", file=sys.stderr)
        return 1
    began = time.monotonic()
    folder = Path(argv[0] if argv else ROOT / "build" / "site")
    html = folder / "html"
    if pages.write(pages.pages(ROOT), folder / "source"):
        shutil.rmtree(html, ignore_errors=True)  # it has pages that are no more
    status = build_main(
        ["-b", "html", "-W", "--keep-going", "-q", "-j", "auto", "-c", str(ROOT / "docs" / "site"),
         "-d", str(folder / "doctrees"), str(folder / "source"), str(html)]
    )  # fmt: skip
    if status:
        shutil.rmtree(folder / "doctrees", ignore_errors=True)  # what has been read with a warning is not read again
        return 1
    if wrong := links.problems(html):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    files = [path for path in html.rglob("*") if path.is_file()]
    count, size = sum(path.suffix == ".html" for path in files), sum(path.stat().st_size for path in files)
    print(f"{html}/index.html: {count} pages, {size / 1e6:.0f} MB, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
