# %% [markdown] name="glossary"
# # Glossary
# Each term once, in the words of this course. Lessons link here at first use.

# %% [markdown] name="lesson-0"
# ## From lesson 0
#
# ### rank
# One process of a job, and its number, counted from zero. All ranks run the same program; what differs is the number.
#
# ### world size
# How many ranks a job has.
#
# ### group
# Ranks that talk together. `world` is the group of all.
#
# ### mesh
# A rank's view of the job: its number, the layout, its device, and the groups it belongs to. Programs get it as an argument.
#
# ### collective
# An operation that all ranks of a group call together, in the same order, with tensors that fit. One that stays away stops all.
#
# ### barrier
# The collective that carries nothing: nobody leaves before everybody has come.
#
# ### all-reduce
# Everybody brings a tensor, everybody leaves with the sum (or the maximum, or the minimum).
#
# ### gather
# Everybody brings a tensor, one rank leaves with the list of them, the others with nothing.
#
# ### broadcast
# One rank brings a tensor, everybody leaves with a copy.
#
# ### payload
# The bytes of the whole logical tensor of an operation.
#
# ### sent
# The bytes one rank sends for an operation under the best algorithm. Closed forms in this course speak of these.
#
# ### tape
# The list of everything a rank sent and received: operation, group, bytes, order, time, line of code.

# %% [markdown] name="lesson-5"
# ## From lesson 5
#
# ### reduce-scatter
# Everybody brings a whole tensor; the tensors are summed, and each rank leaves with its own part of the sum.
#
# ### all-gather
# Everybody brings a part, everybody leaves with all parts in rank order.
#
# ### all-to-all
# Everybody brings a piece for each rank and leaves with the piece that each rank had for it: a transpose.
#
# ### work handle
# What an asynchronous call returns. Its `wait()` gives the result; until then the tensors belong to the operation.
#
# ### rendezvous
# A transfer that ends only when both sides have come. A blocking send on gloo is one.
#
# ### delay line
# A wire of stated latency and bandwidth that every operation has to cross, so that a laptop can feel like a cluster.
#
# ### fingerprint
# What ranks compare before a call in teaching mode: operation, number, shape, dtype, reduction, root.
