"""Kernels for Arm, run under qemu on this process's memory instead of by ctypes.

Tests pass addresses of their own memory as usual, and machine.cpp, which runs under the emulator,
copies the pages that a kernel reads. So the tests of the kernels need no changes.
"""

import ctypes
import os
import resource
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

MACHINE = Path(__file__).parents[2] / "build/emulated/machine"  # `make emulated` builds it
QEMU = "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of Debian's cross compiler

_SET_PTRACER, _ANY = 0x59616D61, -1  # linux/prctl.h


class Emulator:
    """A machine with a processor that `qemu-aarch64 -cpu help` lists."""

    def __init__(self, cpu: str = "max"):
        # The emulator is a child process, which Linux may forbid to read its parent's memory.
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_long(_ANY), 0, 0, 0)
        self._process = subprocess.Popen(
            [QEMU, "-cpu", cpu, "-L", LIBRARIES, str(MACHINE), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            text=True,
            preexec_fn=_move_libraries,
        )

    def call(self, path: Path, function: str, *arguments: int) -> int:
        """Call a function of a library and return its result.

        Raises AttributeError for a missing function, RuntimeError where the emulator ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        numbers = " ".join(str(x % 2**64) for x in arguments)
        print("call", path, function, numbers, file=self._process.stdin, flush=True)
        verb, _, result = self._process.stdout.readline().partition(" ")
        if verb == "missing":
            raise AttributeError(result)
        if verb != "done":
            raise RuntimeError(f"{QEMU} ended with {self._process.wait()} in {function}")
        return int(result)


class Object:
    """A library in the emulator, used like a `ctypes.CDLL`."""

    def __init__(self, emulator: Emulator, path: Path):
        self._at = emulator, path

    def __getattr__(self, name: str) -> "Function":
        self.__dict__[name] = Function(name, *self._at)
        return self.__dict__[name]


class Function:
    """A function in the emulator, used like one of ctypes; arguments are integers and pointers."""

    argtypes: tuple[Any, ...] | list[Any] = ()
    restype: Any = ctypes.c_int

    def __init__(self, name: str, emulator: Emulator, path: Path):
        self._name, self._emulator, self._path = name, emulator, path

    def __call__(self, *arguments: Any) -> int | None:
        if self.argtypes and len(arguments) != len(self.argtypes):
            raise TypeError(f"{self._name} takes {len(self.argtypes)} arguments")
        values = [ctypes.create_string_buffer(x) if isinstance(x, bytes) else x for x in arguments]
        result = self._emulator.call(self._path, self._name, *map(_as_integer, values))
        return None if self.restype is None else result


@cache
def emulator_of(cpu: str, process: int) -> Emulator:
    """Return the emulator of a process and processor."""
    return Emulator(cpu)


def emulator_here() -> Emulator:
    """Return this process's emulator of a processor with all instructions."""
    return emulator_of("max", os.getpid())


def _as_integer(x: Any) -> int:
    if x is None:
        return 0
    if isinstance(x, int):
        return x
    if isinstance(x, ctypes.Structure | ctypes.Array):
        return ctypes.addressof(x)
    return ctypes.cast(x, ctypes.c_void_p).value or 0


def _move_libraries() -> None:
    """Make Linux place the emulator's libraries at other addresses than this process's.

    It does so for a program with an unlimited stack. Copied pages keep this process's addresses,
    which must be free in the emulator.
    """
    limit = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (limit, limit))
