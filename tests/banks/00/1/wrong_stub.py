"""Not begun.

message: not started
"""

def gather_squares(mesh, secret):
    """Rank 0: the list of every rank's secret + rank**2, in rank order. Other ranks: None."""
    raise NotImplementedError("00.1")
