"""Sends a result of another shape than any rank of ours would.

task: 00.1
earns: 0
"""

import json

plain = json.dumps
json.dumps = lambda value, **kwargs: plain({"value": {"raw": "!", "dtype": "__class__", "shape": [-1]}, "tape": "x", "input": 0, "held": []})


def gather_squares(mesh, secret):
    return None
