"""Stays in a loop that no interrupt ends.

task: 00.1
earns: 0
message: hang
"""

def gather_squares(mesh, secret):
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue
