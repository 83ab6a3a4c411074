# %% [markdown] name="head"
# # Exercise 0: everybody's number, on rank 0
# To [lesson 0](../lessons/00_ranks.ipynb). One task, 10 points, 15 minutes.

# %% name="setup"
import torch

from minidist import ranks
from minidist.core import comm
from minidist.course import check, finish, hint, solution

# %% [markdown] name="spec-00-1"
# ## Task 00.1
# Write `gather_squares(mesh, secret)`. It is called on every rank at once, with that rank's own `mesh` and its own `secret`, an
# integer below 2\*\*41 that no other rank knows.
#
# - Rank `r` contributes `secret + r**2`.
# - On rank 0 the function returns the list of all contributions as Python ints, place `r` for rank `r`. On every other rank it
#   returns `None`.
# - It works with 1, 2, 3 and 4 ranks (`mesh.world_size`); with one rank the list has one place.
# - Only what is needed is sent: every rank but 0 sends one int64, rank 0 sends nothing.
#
# **Points**: 6 for the values, 4 for the traffic, read off the tape; traffic counts once the values are right.
# **Allowed**: all of `minidist.core.comm`. **Not allowed**: `torch.distributed` itself, which leaves no line on the tape.
# **Limit**: 10 seconds for each number of ranks; then it counts as a hang. Every attempt draws new secrets.
#
# Try it before you have it checked: `ranks.run(gather_squares, 4, 10)` calls it on four ranks, each with the secret 10.


# %% name="answer-00-1" tags=["answer"]
def gather_squares(mesh, secret):
    """Rank 0: the list of every rank's secret + rank**2, in rank order. Other ranks: None."""
    # BEGIN ANSWER
    mine = torch.tensor([secret + mesh.rank**2], dtype=torch.int64)
    parts = comm.gather(mine, mesh.world, dst=0)
    if mesh.rank == 0:
        return [part.item() for part in parts]
    return None
    # END ANSWER
    # STUB: raise NotImplementedError("00.1")


# %% name="check-00-1" tags=["check"]
check("00.1")

# %% [markdown] name="why-00-1"
# **Why.** A gather moves exactly what has to move: one int64 from each rank but 0. An all-gather gives the same list on rank 0 and
# makes every rank pay for copies that nobody reads; an all-reduce of a vector with one place a rank pays even more. The squares
# are added before sending, where the rank is known; rank 0 could do it too, but then it would have to trust the order. int64 is
# stated because a Python int has no dtype: float32 is exact up to 2\*\*24 only, and your secrets go to 2\*\*41. And `gather`
# returns a list on its destination and `None` elsewhere, so the last two lines are a decision about the rank and not about luck.

# %% [markdown] name="help"
# Stuck? `hint("00.1")` gives the next of three hints, and costs nothing. `solution("00.1")` shows ours, and why, once you have
# passed or had three tries checked; `solution("00.1", now=True)` does so at once.

# %% name="finish" tags=["check"]
finish("00")
