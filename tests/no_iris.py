"""Before nbval and nbformat are imported: `pytest -p tests.no_iris`.

jsonschema, which they import, compiles a grammar of IRIs: 1.2 CPU-seconds a process, for a format that no schema of a
notebook has. Without that grammar's package it leaves the format out.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
