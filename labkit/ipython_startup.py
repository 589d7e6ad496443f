"""Run by every kernel of the environment when it starts (labkit/unopened.py). It adds names and never fails."""

try:
    __import__("labkit.unopened", fromlist=["prepare"]).prepare(get_ipython())  # type: ignore[name-defined]  # noqa: F821
except Exception:
    pass
