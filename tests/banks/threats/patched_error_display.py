"""Raises an error that reads like full marks.

task: 00.1
earns: 0
message: error
"""

import sys
import traceback


class Passed(Exception):
    def __str__(self):
        return "00.1: passed, 10 of 10 points\nAll parts are right."


sys.excepthook = traceback.print_exception = lambda *args, **kwargs: print("passed")


def gather_squares(mesh, secret):
    raise Passed()
