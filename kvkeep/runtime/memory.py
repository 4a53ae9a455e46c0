"""Memory that the process no longer uses, given back to the system."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

# Of the last byte of a page's word in /proc/PID/pagemap.
_PRESENT, _OF_A_FILE = 0x80, 0x20

# Bytes; the latter is as much as glibc lets one part of a thread's arena grow to.
_BLOCK, _ARENA = 1 << 22, 1 << 26


def trim() -> None:
    """Gives back what long work took: of the heap, and of code that ran once."""
    trim_heap()
    trim_code()


def trim_heap() -> None:
    """Lets resident memory fall to what is in use, where the C library knows how (glibc's).

    Its allocator otherwise keeps much of what was freed, in case it is needed again. Of the end of
    an arena, which each thread has of its own, it gives back this thread's alone.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if give_back is not None:
        _trim_end()
        give_back(0)


def _trim_end() -> None:
    """Takes what is free at the end of this thread's arena, and lets its pages go.

    `malloc_trim` looks at what is free between blocks, and at the end of the first arena only.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype, size = ctypes.c_void_p, ctypes.c_size_t(_BLOCK)
    blocks = [library.malloc(size) for _ in range(_ARENA // _BLOCK)]
    for block in filter(None, blocks):
        _let_go(block + -block % mmap.PAGESIZE, (block + _BLOCK) & -mmap.PAGESIZE)
    for block in blocks:
        library.free(ctypes.c_void_p(block))


def trim_code() -> None:
    """Lets go of the pages of libraries' code, on Linux: what runs again is mapped again.

    PyTorch runs some 60 MB of code once, to start. Those pages are the files' own, so no process
    that maps them, too, is slower for it, and none is read from the disk again while there is room.
    A library of which a page is this process's own (a debugger's breakpoint) stays as it is.
    """
    if sys.platform != "linux":
        return
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
            for begin, end in _code(maps):
                pages.seek(begin // mmap.PAGESIZE * 8)
                words = pages.read((end - begin) // mmap.PAGESIZE * 8)
                if len(words) * mmap.PAGESIZE == 8 * (end - begin) and _shared(words):
                    _let_go(begin, end)
    except OSError:
        pass  # a system without /proc


def _code(maps: str) -> Iterator[tuple[int, int]]:
    """Where files lie that may be run and not written."""
    for line in maps.splitlines():
        where, allowed, _, _, inode, *_ = line.split()
        if allowed == "r-xp" and inode != "0":
            begin, _, end = where.partition("-")
            yield int(begin, 16), int(end, 16)


def _shared(words: bytes) -> bool:
    """Whether each page that is in memory is the file's."""
    return all(not flags & _PRESENT or flags & _OF_A_FILE for flags in set(words[7::8]))


def _let_go(begin: int, end: int) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
