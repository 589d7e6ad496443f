"""Lab 08's disk, which forgets what it has not confirmed, its killer, and its simulated ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from course.lab08.disk import Disk, Killed, fates, replay
from course.lab08.killer import RealDisk, RealStore, operations
from course.lab08.together import Ranks

ROOT = Path(__file__).resolve().parents[2]


def contents(disk: Disk, path: str) -> set[bytes]:
    """What a power cut may leave in a file, over all the names that it may leave."""
    folder, _, name = path.rpartition("/")
    return {
        data
        for folders in disk.after_a_power_cut()
        for left in folders.get(folder, [])
        for data in left.files.get(name, frozenset())
    }


def names(disk: Disk, folder: str) -> set[tuple[str, ...]]:
    """The sets of files that a power cut may leave in a folder."""
    return {tuple(sorted(left.files)) for folders in disk.after_a_power_cut() for left in folders.get(folder, [])}


def test_bytes_are_safe_when_their_file_is_confirmed_and_no_sooner():
    disk = Disk({"a/f": b"old!"})
    disk.write("a/f", b"new numbers")
    assert contents(disk, "a/f") == {b"old!", b"", b"new n", b"new numbers"}
    disk.fsync("a")
    disk.fsync("")
    assert contents(disk, "a/f") == {b"old!", b"", b"new n", b"new numbers"}
    disk.fsync("a/f")
    assert contents(disk, "a/f") == {b"new numbers"}


def test_names_are_safe_when_their_folder_is_confirmed_and_no_sooner():
    disk = Disk({"a/f": b"1"})
    disk.write("a/g", b"2")
    disk.rename("a/f", "a/h")
    disk.fsync("a/g")
    assert names(disk, "a") == {("f",), ("f", "g"), ("g", "h")}, "in the order of the changes"
    disk.fsync("a")
    assert names(disk, "a") == {("g", "h")}


def test_a_renamed_folder_is_under_one_of_its_names():
    disk = Disk()
    disk.mkdir("new")
    disk.fsync("")
    disk.rename("new", "step-20")
    assert [sorted(folders) for folders in disk.after_a_power_cut()] == [["new"], ["step-20"]]
    disk.fsync("")
    assert [sorted(folders) for folders in disk.after_a_power_cut()] == [["step-20"]]


def test_what_a_disk_refuses():
    disk = Disk({"a/f": b"1", "b/g": b"2"})
    for error, ask in (
        (FileExistsError, lambda: disk.mkdir("a")), (FileNotFoundError, lambda: disk.write("c/f", b"")),
        (FileNotFoundError, lambda: disk.fsync("a/g")), (OSError, lambda: disk.remove("a")),
        (FileExistsError, lambda: disk.rename("a", "b")), (ValueError, lambda: disk.rename("a/f", "b/f")),
        (FileNotFoundError, lambda: disk.read("a")), (FileNotFoundError, lambda: disk.names("c")),
        (IsADirectoryError, lambda: disk.write("a", b"")), (FileNotFoundError, lambda: disk.remove("a/x")),
        (FileNotFoundError, lambda: disk.rename("x", "y")),
    ):  # fmt: skip
        with pytest.raises(error):
            ask()
    assert disk.log == [], "what was refused has changed nothing"


def test_a_program_dies_at_its_change_and_stays_dead_until_the_next_one_starts():
    disk = Disk({"a/f": b"1"}, kill_at=2)
    disk.mkdir("b")
    with pytest.raises(Killed):
        disk.write("b/g", b"1234")
    for ask in (lambda: disk.names(), lambda: disk.read("a/f"), lambda: disk.fsync("")):
        with pytest.raises(Killed):
            ask()
    disk.restart()
    assert disk.names() == ["a", "b"] and disk.read("b/g") == b"12", "half of the write was made"
    other = Disk({"a/f": b"1"}, kill_at=1)
    with pytest.raises(Killed):
        other.remove("a/f")
    other.restart()
    assert other.names("a") == ["f"], "any other change is not made"


def in_place(disk: Any) -> None:
    disk.mkdir("step-20")
    disk.write("step-20/f", b"new")


def staged(disk: Any) -> None:
    disk.mkdir(".new")
    disk.write(".new/f", b"new")
    disk.fsync(".new/f")
    disk.fsync(".new")
    disk.rename(".new", "step-20")
    disk.fsync("")


@pytest.mark.parametrize(
    ("save", "killed", "cut"),
    [
        (in_place, ["broken", "new"], [{"old", "broken"}, {"old", "new", "broken"}]),
        (staged, ["old", "old", "old", "old", "new", "new"], [{"old"}] * 4 + [{"old", "new"}, {"new"}]),
    ],
)
def test_what_a_reader_can_find_after_each_change(save, killed, cut):
    before, saves = {"step-10/f": b"old"}, {"step-10": {"f": b"old"}, "step-20": {"f": b"new"}}
    disk = Disk(before)
    save(disk)
    found = [
        (fates(now, saves, "step-20", power=False), fates(now, saves, "step-20"))
        for _, now in replay(before, disk.log)
    ]  # fmt: skip
    assert [one for one, _ in found] == [{fate} for fate in killed]
    assert [other for _, other in found] == cut


# --------------------------------------------------------------------------------------------------------- real files


def test_a_real_disk_does_what_the_simulated_one_does(tmp_path):
    disk, real = Disk(), RealDisk(tmp_path)
    for one in (disk, real):
        in_place(one)
        one.mkdir(".old")
        one.write(".old/x", b"")
        one.fsync(".old")
        one.remove(".old/x")
        one.remove(".old")
        one.rename("step-20/f", "step-20/g")
    assert real.names() == disk.names() == ["step-20"]
    assert real.names("step-20") == disk.names("step-20") and real.read("step-20/g") == disk.read("step-20/g")


def test_a_process_dies_at_the_change_that_was_asked_for(tmp_path):
    program = (
        "import sys; from course.lab08.killer import RealDisk, operations\n"
        "with operations(int(sys.argv[2])):\n"
        "    disk = RealDisk(sys.argv[1]); disk.mkdir('a'); disk.write('a/f', b'1234'); disk.rename('a', 'b')\n"
    )
    left = []
    for at in range(1, 7):
        root = tmp_path / str(at)
        root.mkdir()
        done = subprocess.run([sys.executable, "-c", program, root, str(at)], cwd=ROOT, timeout=60)
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        left.append((done.returncode, sorted(path.name for path in root.iterdir()), files))
    assert left == [
        (9, [], {}), (9, ["a"], {}), (9, ["a"], {"a/f": b""}), (9, ["a"], {"a/f": b"12"}), (9, ["a"], {"a/f": b"1234"}),
        (0, ["b"], {"b/f": b"1234"}),
    ]  # fmt: skip


def test_operations_are_counted_and_can_fail(tmp_path):
    disk = RealDisk(tmp_path)
    with operations(10_000) as count:
        staged(disk)
    assert count == [8], "mkdir, open, a write in two halves, three fsyncs, rename"
    with operations(1, OSError("full")), pytest.raises(OSError, match="full"):
        disk.mkdir("x")


def save(disk, store, rank):
    """Rank 0 makes a folder, each writes a file of four bytes; all wait for all, for ten seconds."""
    if rank == 0:
        disk.mkdir("a")
        store.set("made", "yes")
    store.wait(["made"], 10.0)
    disk.write(f"a/{rank}", b"1234")
    store.set(f"{rank}", "done")
    store.wait(["0", "1", "2"], 10.0)


def run(order=0, **of_rank_1):
    ranks = Ranks(Disk(), order)
    for rank in range(3):
        ranks.start(save, rank, **(of_rank_1 if rank == 1 else {}))
    ranks.run()
    return ranks


def ends(ranks):
    return {rank: what for _, rank, _, what, *path in ranks.events if not path}


def test_ranks_take_turns_as_the_order_says():
    found = [[rank for _, rank, _, what, *_ in run(order).events if what == "write"] for order in (0, 1, 3, 3)]
    assert found[0] == [0, 1, 2] and found[1] == [2, 1, 0] and found[2] == found[3]
    assert ends(run()) == dict.fromkeys(range(3), "returned")


def test_a_rank_dies_in_the_middle_of_a_write_and_the_others_wait_until_their_deadline():
    ranks = run(kill_at=1)
    assert ranks.disk.read("a/1") == b"12" and ends(ranks)[1] == "died"
    assert ends(ranks)[0] == ends(ranks)[2] == "TimeoutError: after 10 s still not there: 1"
    assert 10 < ranks.now < 10.1


def test_a_late_rank_is_waited_for_and_one_that_stalls_goes_on_when_it_is_woken():
    assert ends(run(late=9.0)) == dict.fromkeys(range(3), "returned")
    ranks = run(stall_at=1)
    assert 1 not in ends(ranks) and ranks.disk.names("a") == ["0", "2"]
    ranks.wake()
    ranks.run()
    assert ends(ranks)[1] == "returned" and ranks.disk.read("a/1") == b"1234"
    ranks = run(stall_at=1)
    ranks.close()
    assert ends(ranks)[1] == "died" and ranks.disk.names("a") == ["0", "2"]


def test_a_store_of_torch_has_the_same_words(tmp_path):
    store = RealStore(torch.distributed.FileStore(str(tmp_path / "store"), 1))
    store.set("a", "text")
    store.wait(["a"], 1.0)
    assert store.get("a") == "text" and store.check(["a"]) and not store.check(["a", "b"])
    with pytest.raises(TimeoutError, match="one of a, b"):
        store.wait(["a", "b"], 0.01)
