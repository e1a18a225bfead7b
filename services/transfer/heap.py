"""What the C library does with memory that messages were received into."""

from __future__ import annotations

import ctypes

from services.transfer.config import MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MOST_MMAP_THRESHOLD = 32 * MIB  # glibc takes no more


def keep_freed(num_bytes: int) -> bool:
    """Let the process keep up to `num_bytes` of freed memory; False where malloc is not glibc's.

    ZMQ allocates every frame, and glibc gives frames of this size back to the kernel at once: a
    page fault for each 4 KiB that arrives, and half of the receiving time. It stops by itself
    once the process has freed some larger piece, but whether it has is chance. These limits are
    the ones it arrives at then.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    limits = {_M_MMAP_THRESHOLD: _MOST_MMAP_THRESHOLD, _M_TRIM_THRESHOLD: num_bytes}
    return all(mallopt(name, value) == 1 for name, value in limits.items())
