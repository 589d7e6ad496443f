"""What the grader promises is tried on this machine, and on machines that allow less; marks depend on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import promises
from labkit.fresh import Nursery
from minimegatron.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what holds is the kernel's, and Linux's")

MACHINES = {
    "all of it": [],
    "no namespaces": ["unshare"],
}
BY_FILES = {
    "read what others wrote", "read the inputs of other ranks", "see other processes", "write outside its folder",
    "change files outside its folder",
}  # fmt: skip


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest, nursery: Nursery) -> Iterator[tuple[str, Nursery]]:
    if request.param == "all of it":
        yield request.param, nursery
        return
    with Nursery(without=MACHINES[request.param]) as other:
        other.warm_up()
        yield request.param, other


def test_each_promise_is_tried(machine: tuple[str, Nursery], tmp_path: Path) -> None:
    name, nursery = machine
    (tmp_path / "ada.ipynb").write_text("an answer")
    held = promises.tried(nursery, [tmp_path])
    lost = {promise for promise, prevented in held.items() if not prevented}
    assert lost == (BY_FILES if name == "no namespaces" else set())
    assert [file.name for file in tmp_path.iterdir()] == ["ada.ipynb"]
    if lost:
        with pytest.raises(ConfigError, match=r"(?s)One could .*see other processes.*--trust") as refused:
            promises.required(held)
        assert refused.value.exit_code == 2
    else:
        promises.required(held)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kernel/unprivileged_userns_clone", "0\n", "sysctl kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1\n", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0\n", "user.max_user_namespaces=15000"),
        ("user/max_user_namespaces", "9\n", ""),
    ],
)
def test_the_advice_is_for_this_machine(tmp_path: Path, name: str, value: str, said: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(value)
    assert said in promises.advice(tmp_path)
    assert ("sysctl" in promises.advice(tmp_path)) == bool(said)
