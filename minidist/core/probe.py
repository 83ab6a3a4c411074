"""Small trials of what a rank stands on: arithmetic of its device, and a collective over loopback. Each says what is wrong, or
nothing."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist


def arithmetic(device: torch.device, size: int = 256, rounds: int = 3) -> str:
    """Products of matrices of small whole numbers, exact in float32 whatever the order of the sums, against int64's."""
    numbers = torch.arange(size * size).view(size, size)
    for k in range(1, rounds + 1):
        a, b = numbers * k % 17 - 8, numbers * (k + 2) % 13 - 6  # sums of 256 products of at most 48: below 2^24
        found = (a.float().to(device) @ b.float().to(device)).cpu()
        wrong = int((found != (a @ b).float()).sum())
        if wrong:
            return f"{device} multiplies matrices wrongly: {wrong} of {found.numel()} elements differ from the exact product"
    return ""


def memory(device: torch.device, nbytes: int = 1 << 24) -> str:
    """Alternating bits written to `nbytes` of the device's memory and read back."""
    try:
        for pattern in (0x55, 0xAA):
            cells = torch.full((nbytes,), pattern, dtype=torch.uint8, device=device)
            if wrong := int((cells != pattern).sum().cpu()):
                return f"{device}'s memory keeps {wrong} of {nbytes} bytes wrong"
    except RuntimeError as error:  # out of memory
        return f"{device} has no {nbytes} bytes of memory to give: {str(error).splitlines()[0]}"
    return ""


def loopback(timeout_s: float = 10.0) -> str:
    """An all-reduce over gloo between two threads of this process: sockets, interface, host name."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    sums, errors = [torch.tensor([rank + 1.0]) for rank in range(2)], []

    def join(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store.clone(), rank, 2, timedelta(seconds=timeout_s))
            group.allreduce([sums[rank]]).wait()
        except Exception as error:
            errors.append(str(error).splitlines()[0])

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 1)
    if errors or any(thread.is_alive() for thread in threads):
        return f"an all-reduce over loopback failed: {errors[0] if errors else f'no answer in {timeout_s:g} s'}"
    return "" if [x.item() for x in sums] == [3.0, 3.0] else f"an all-reduce over loopback summed 1 + 2 to {sums[0].item():g}"
