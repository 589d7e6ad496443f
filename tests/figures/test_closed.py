"""Some modules of the course compute what an exercise asks for, so no judged program may import them."""

import importlib
import pkgutil
from pathlib import Path

import course
from labkit import closing

LABS = Path(__file__).parents[2] / "labs"


def test_the_drawings_are_closed_in_every_lab():
    labs = [info.name for info in pkgutil.iter_modules(course.__path__) if info.name[:1].isdigit()]
    assert labs == sorted(path.stem for path in LABS.glob("*.ipynb"))
    for name in labs:
        for exercise in importlib.import_module(f"course.{name}").LAB.exercises.values():
            assert {"course.figures", "course.rehearsal", "minimegatron.viz"} <= {*exercise.without}
    [folder] = closing.files_of(["course.figures"])
    assert (folder / "kernels.py").is_file()
