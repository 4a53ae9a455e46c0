"""The process's memory: give unused memory back to the system, and read the peak in RAM."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

# Bits of the last byte of a page's word in /proc/PID/pagemap.
_PRESENT, _OF_A_FILE = 0x80, 0x20

# In bytes. glibc lets one part of a thread's arena grow to _ARENA.
_BLOCK, _ARENA = 1 << 22, 1 << 26


def trim() -> None:
    """Give back what long work took: of the heap, and of code that ran once."""
    trim_heap()
    trim_code()


def trim_heap() -> None:
    """Let resident memory fall to what is in use, where the C library can (glibc).

    Its allocator otherwise keeps much of what was freed, in case it is needed again. Each thread
    has an arena of its own; of the end of an arena only the calling thread's is given back.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "malloc_trim"):
        _trim_arena_end(library)
        library.malloc_trim(0)


def _trim_arena_end(library: ctypes.CDLL) -> None:
    """Allocate what is free at the end of the thread's arena, release its pages, and free it.

    `malloc_trim` finds free memory between blocks, and at the end of the first arena only.
    """
    library.malloc.restype, size = ctypes.c_void_p, ctypes.c_size_t(_BLOCK)
    blocks = [library.malloc(size) for _ in range(_ARENA // _BLOCK)]
    for block in filter(None, blocks):
        _release_pages(block + -block % mmap.PAGESIZE, (block + _BLOCK) & -mmap.PAGESIZE)
    for block in blocks:
        library.free(ctypes.c_void_p(block))


def trim_code() -> None:
    """Release the pages of libraries' code, on Linux: code that runs again is mapped again.

    PyTorch runs some 60 MB of code once, to start. Those pages are the files' own, so no process
    that maps them, too, becomes slower, and none is read from disk again while there is room. A
    library with a page that is private to this process (a debugger's breakpoint) is left alone.
    """
    if sys.platform != "linux":
        return
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
            for begin, end in _code_ranges(maps):
                pages.seek(begin // mmap.PAGESIZE * 8)
                words = pages.read((end - begin) // mmap.PAGESIZE * 8)
                if len(words) * mmap.PAGESIZE == 8 * (end - begin) and _all_of_file(words):
                    _release_pages(begin, end)
    except OSError:
        pass  # a system without /proc


def _code_ranges(maps: str) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of files that are executable and not writable."""
    for line in maps.splitlines():
        addresses, permissions, _, _, inode, *_ = line.split()
        if permissions == "r-xp" and inode != "0":
            begin, _, end = addresses.partition("-")
            yield int(begin, 16), int(end, 16)


def _all_of_file(words: bytes) -> bool:
    """Whether each page that is in memory is the file's. words: eight bytes a page."""
    return all(not flags & _PRESENT or flags & _OF_A_FILE for flags in set(words[7::8]))


def _release_pages(begin: int, end: int) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def peak_rss() -> int:
    """Return the most memory that this process has had in RAM, in bytes."""
    try:
        # Preferred where it exists: getrusage also counts the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # a system without /proc
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
