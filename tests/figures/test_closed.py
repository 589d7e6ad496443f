"""Some modules of the course compute what an exercise asks for, so no judged program may import them."""

import importlib
import pkgutil

import course
from labkit import closing


def test_the_drawings_are_closed_in_every_lab():
    labs = [info.name for info in pkgutil.iter_modules(course.__path__) if info.name[:1].isdigit()]
    assert len(labs) == 11
    for name in labs:
        for exercise in importlib.import_module(f"course.{name}").LAB.exercises.values():
            assert {"course.figures", "course.rehearsal", "course.own_scheduler", "minimegatron.viz"} <= {
                *exercise.without
            }
    [folder] = closing.files_of(["course.figures"])
    assert (folder / "kernels.py").is_file()
