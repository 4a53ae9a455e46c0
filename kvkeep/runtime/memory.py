"""The process's memory: give unused memory back to the system, and read the peak in RAM."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

# Bits of the last byte of a page's word in /proc/PID/pagemap.
_PAGE_PRESENT, _PAGE_OF_FILE = 0x80, 0x20
# In bytes. A thread's arena in glibc consists of heaps of at most _MAX_HEAP_BYTES.
_BLOCK_BYTES, _MAX_HEAP_BYTES = 1 << 22, 1 << 26


def trim_memory() -> None:
    """Give memory back to the system: of the heap, and of code that ran once."""
    trim_heap()
    trim_code()


def trim_heap() -> None:
    """Release freed memory that the allocator keeps for later; does nothing without glibc.

    Free memory at the end of an arena is released only for the calling thread's arena.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "malloc_trim"):
        _trim_arena_end(libc)
        libc.malloc_trim(0)


def _trim_arena_end(libc: ctypes.CDLL) -> None:
    """Allocate what is free at the end of the thread's arena, release its pages, and free it.

    `malloc_trim` releases memory between blocks in any arena, but at the end only in the main one.
    """
    # glibc maps blocks of more than 128 KiB apart from arenas at first. But when it frees such a
    # block, of up to 32 MiB, it raises that threshold to the block's size. Loading a model, or a
    # first call of this function, thus raises it to more than _BLOCK_BYTES.
    libc.malloc.restype, size = ctypes.c_void_p, ctypes.c_size_t(_BLOCK_BYTES)
    blocks = [libc.malloc(size) for _ in range(_MAX_HEAP_BYTES // _BLOCK_BYTES)]
    for block in filter(None, blocks):
        _release_pages(block + -block % mmap.PAGESIZE, (block + _BLOCK_BYTES) & -mmap.PAGESIZE)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))


def trim_code() -> None:
    """Release the pages of libraries' code, on Linux; code that runs again is mapped again.

    PyTorch runs about 60 MB of code only once, when it starts. The pages stay in the system's page
    cache, so mapping them again seldom reads the disk, and other processes are not affected. A
    library with a page of this process alone, such as a debugger's breakpoint, is left as it is.
    """
    if sys.platform != "linux":
        return
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for begin, end in _code_ranges(maps):
                pagemap.seek(begin // mmap.PAGESIZE * 8)
                words = pagemap.read((end - begin) // mmap.PAGESIZE * 8)
                if len(words) * mmap.PAGESIZE == 8 * (end - begin) and _all_file_backed(words):
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


def _all_file_backed(words: bytes) -> bool:
    """Whether each page in memory is of a file. words: the pagemap's eight bytes of each page."""
    return all(not flags & _PAGE_PRESENT or flags & _PAGE_OF_FILE for flags in set(words[7::8]))


def _release_pages(begin: int, end: int) -> None:
    """Release the pages between two addresses: what was in them is lost, or read again on use."""
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process."""
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
