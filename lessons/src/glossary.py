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

# %% [markdown] name="lesson-1"
# ## From lesson 1
#
# ### FLOP
# One floating-point operation: a multiply is one, an add another. FLOPs are a count, FLOP/s a rate.
#
# ### arithmetic intensity
# FLOPs of an operation for each byte it moves to and from memory, every input read once and every output written once.
#
# ### roofline
# What an operation can reach on a machine, drawn over its intensity: a slope where memory is the limit, flat where arithmetic is.
#
# ### ridge
# The intensity at which the slope of a roofline meets its flat part: peak FLOP/s over bytes/s.
#
# ### SM
# A streaming multiprocessor: one of the many cores of a GPU, with registers, shared memory and arithmetic units of its own.
#
# ### warp
# Threads of a GPU that take every step together: thirty-two of them on most.
#
# ### occupancy
# Warps resident on an SM, as a share of the warps it has room for.
#
# ### tensor core
# The unit of an SM that multiplies small tiles of matrices, in formats of two bytes and fewer.
#
# ### kernel
# A function that runs on the device; also what one operation launches. (The kernel of a notebook is another thing altogether.)
#
# ### stream
# A queue of kernels and copies that a device works off in order. Between two streams there is no order without an event.
#
# ### event
# A mark in a stream that others can wait for.
#
# ### pinned memory
# Memory of the host at a fixed physical address, so that a device can copy from it while the CPU does something else.

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

# %% [markdown] name="lesson-7"
# ## From lesson 7
#
# ### replica
# A rank's copy of the whole model in data parallelism. Equal at the start and equally updated, or no replica.
#
# ### bucket
# Gradients of several parameters in one flat tensor, reduced by one call.
#
# ### overlap
# Communication that is under way while the device computes.
#
# ### exposed
# The part of communication that nothing computes beside: what is left when all else is done.
#
# ### accumulation
# Adding up the gradients of several micro-batches before one optimizer step, hence one reduction.
