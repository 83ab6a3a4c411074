"""Blocking calls only: of each pair, the lower rank sends first and the higher receives first. A chain for the broadcast."""

import torch

from minidist.core import comm


def swap(mesh, mine, peer):
    theirs = torch.empty_like(mine)
    if mesh.rank < peer:
        comm.send(mine, mesh.world, dst=peer)
    comm.recv(theirs, mesh.world, src=peer)
    if mesh.rank > peer:
        comm.send(mine, mesh.world, dst=peer)
    return theirs


def broadcast(mesh, x, src):
    n = mesh.world_size
    place = (mesh.rank - src) % n  # in a chain that begins at src
    got = x
    if place > 0:
        got = comm.recv(torch.empty_like(x), mesh.world, src=(mesh.rank - 1) % n)
    if place < n - 1:
        comm.send(got, mesh.world, dst=(mesh.rank + 1) % n)
    return got


def pieces(mesh, x):
    k = len(x) // mesh.world_size
    return [x[r * k : (r + 1) * k] for r in range(mesh.world_size)]


def reduce_scatter(mesh, x):
    parts = pieces(mesh, x)
    total = parts[mesh.rank].clone()
    for peer in range(mesh.world_size):
        if peer != mesh.rank:
            total = total + swap(mesh, parts[peer], peer)
    return total


def all_gather(mesh, x):
    return torch.cat([x if peer == mesh.rank else swap(mesh, x, peer) for peer in range(mesh.world_size)])


def all_to_all(mesh, x):
    parts = pieces(mesh, x)
    return torch.cat([p if peer == mesh.rank else swap(mesh, p, peer) for peer, p in enumerate(parts)])
