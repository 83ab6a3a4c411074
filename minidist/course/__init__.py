"""course: what lessons use. `import minidist.course` also brings the `%%ranks` magic and starts keeping the session.

Open first `claims.py` (predict, claim), then `exercise.py` (check, hint, finish) and `answers.py`, then `grading.py` and a
file of `tasks/`.
"""

from minidist.course import session
from minidist.course.answers import solution
from minidist.course.claims import claim, predict
from minidist.course.exercise import check, finish, hint
from minidist.course.map import course_map
from minidist.course.show import gpu, rank_names, source
from minidist.course.widgets import rank_strip, widget

__all__ = [
    "check",
    "claim",
    "course_map",
    "finish",
    "gpu",
    "hint",
    "predict",
    "rank_names",
    "rank_strip",
    "solution",
    "source",
    "widget",
]


def _load() -> None:
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is not None:
        shell.run_line_magic("load_ext", "minidist.ranks")
    session.watch()


_load()
