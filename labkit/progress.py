"""`minimegatron progress`: your points in each lab, as far as `check` has seen your code.

Reads `.work/<lab>/` beside the notebooks (`workspace`, `record`) and runs nothing. Code that has changed since its last
check counts as not checked. Who has worked in `my-labs/` and in `labs/` gets, for each lab, the better of the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from labkit.grade import known_courses
from labkit.grading import Course
from labkit.record import NAME, Newer, Unusable, course_digest, read, valid
from labkit.verdict import SIGNS, Verdict
from minimegatron.commands.my_labs import FOLDER
from minimegatron.errors import ConfigError
from minimegatron.flags import Parser

_PLACES = (Path(FOLDER), Path("labs"))
_HERE = f"{FOLDER}/ and labs/, or this folder"


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Raises:
        ConfigError: there is no such folder.
    """
    parser = Parser("minimegatron progress", description="Your points in each lab.")
    parser.add_argument("folder", nargs="?", type=Path, help=f"where the notebooks are (default: {_HERE})")
    parser.add_argument("--course", default="course", metavar="PACKAGE", help="where labs are declared (course)")
    options = parser.parse_args(argv)
    folders = [options.folder] if options.folder else [path for path in _PLACES if path.is_dir()] or [Path()]
    if not folders[0].is_dir():
        raise ConfigError(f"{folders[0]} is not a folder", fix="name the folder that holds the notebooks")
    print(table(folders, known_courses(options.course)))
    return 0


def table(folders: Sequence[Path], courses: dict[str, Course]) -> str:
    """One line a lab, the best of these folders, and the sum."""
    rows, trouble = [("lab", "points", "exercises")], []
    total = of = 0
    for name, course in courses.items():
        known = [standing(folder / ".work" / name, course) for folder in folders]
        verdicts, _ = max(known, key=lambda one: sum(verdict.points for verdict in one[0]))
        problem = next((said for _, said in known if said), "")
        points = sum(verdict.points for verdict in verdicts)
        total, of = total + points, of + course.lab.points
        states = Counter(verdict.state for verdict in verdicts)
        states["todo"] += len(course.lab.exercises) - len(verdicts)
        said = "  ".join(f"{SIGNS[state]} {states[state]}" for state in ("passed", "wrong", "todo"))
        rows.append((name, f"{points}/{course.lab.points}", said))
        trouble += [f"{name}: {problem}"] if problem else []
    rows.append(("all", f"{total}/{of}", ""))
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{name:<{wide[0]}}  {points:>{wide[1]}}  {said}".rstrip() for name, points, said in rows]
    return "\n".join(lines + trouble)


def standing(work: Path, course: Course) -> tuple[list[Verdict], str]:
    """(the verdicts that still hold, what is wrong with the file)."""
    try:
        kept = read(work / NAME)
    except FileNotFoundError:
        return [], ""
    except Newer:
        return [], f"{NAME} is of a newer minimegatron"
    except Unusable as error:
        return [], f"{NAME} {error}"
    except OSError as error:
        return [], f"{NAME} cannot be read ({error.strerror})"
    sources = {path.stem: path.read_text(errors="replace") for path in sorted((work / "exercises").glob("*.py"))}
    found = (valid(kept, name, sources, course_digest(course.module)) for name in course.lab.exercises)
    return [verdict for verdict in found if verdict], ""
