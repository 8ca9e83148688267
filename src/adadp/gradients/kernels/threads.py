"""Running a C function on torch's own threads.

A pool of threads of another library fights with torch's for the cores: after each operation torch's threads go on
looking for work for a while, and where a machine is busy every change from one pool to the other costs milliseconds.
On Linux torch's threads are those of an OpenMP library whose entry point for compiled code, GOMP_parallel, is there for
everybody. Where it is not found, one thread does the work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

import torch

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def in_parallel(function: int, data: int) -> None:
    """Call `function(data)`, both given by their addresses, on each of the threads that torch uses, and wait for them.

    The function shares out the work by itself. It may be called on fewer threads, or on one.
    """
    threads = torch.get_num_threads()
    start = _entry() if threads > 1 and os.getpid() == _HOME else None
    if start is None:  # a forked process has none of its parent's threads
        _Function(function)(data)
    else:
        start(function, data, threads, 0)


_HOME = os.getpid()


@cache
def _entry() -> Callable[[int, int, int, int], None] | None:
    try:
        entry = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # no such function; not a system where a process can be searched
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry
