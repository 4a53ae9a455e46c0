"""Kernels for Arm, run under qemu on this process's memory, where ctypes would call one of its own.

Nothing is described twice: tests hand over addresses as they always do, and machine.cpp, under the
emulator, copies what is read there. So the tests of the kernels are those of these, too.
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
    """A machine of that processor, as `qemu-aarch64 -cpu help` names it."""

    def __init__(self, cpu: str = "max"):
        # Where Linux asks for it: the emulator is a child, which by itself may not read its parent.
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_long(_ANY), 0, 0, 0)
        self._process = subprocess.Popen(
            [QEMU, "-cpu", cpu, "-L", LIBRARIES, str(MACHINE), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            text=True,
            preexec_fn=_lie_elsewhere,
        )

    def call(self, path: Path, function: str, *arguments: int) -> int:
        """What a function of an object returns.

        Raises AttributeError for one that it does not have, RuntimeError where the emulator ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        numbers = " ".join(str(each % 2**64) for each in arguments)
        print("call", path, function, numbers, file=self._process.stdin, flush=True)
        verb, _, result = self._process.stdout.readline().partition(" ")
        if verb == "missing":
            raise AttributeError(result)
        if verb != "done":
            raise RuntimeError(f"{QEMU} ended with {self._process.wait()} in {function}")
        return int(result)


class Object:
    """What `ctypes.CDLL` is, of an object that runs there."""

    def __init__(self, emulator: Emulator, path: Path):
        self._at = emulator, path

    def __getattr__(self, name: str) -> "Function":
        self.__dict__[name] = Function(name, *self._at)
        return self.__dict__[name]


class Function:
    """What ctypes makes of a C function whose arguments are integers and pointers."""

    argtypes: tuple[Any, ...] | list[Any] = ()
    restype: Any = ctypes.c_int

    def __init__(self, name: str, emulator: Emulator, path: Path):
        self._name, self._emulator, self._path = name, emulator, path

    def __call__(self, *given: Any) -> int | None:
        if self.argtypes and len(given) != len(self.argtypes):
            raise TypeError(f"{self._name} takes {len(self.argtypes)} arguments")
        held = [ctypes.create_string_buffer(x) if isinstance(x, bytes) else x for x in given]
        found = self._emulator.call(self._path, self._name, *map(_as_integer, held))
        return None if self.restype is None else found


@cache
def machine(cpu: str, process: int) -> Emulator:
    """The one of this process."""
    return Emulator(cpu)


def here() -> Emulator:
    return machine("max", os.getpid())


def _as_integer(x: Any) -> int:
    if x is None:
        return 0
    if isinstance(x, int):
        return x
    if isinstance(x, ctypes.Structure | ctypes.Array):
        return ctypes.addressof(x)
    return ctypes.cast(x, ctypes.c_void_p).value or 0


def _lie_elsewhere() -> None:
    """With a stack without end Linux puts a program's libraries where they are not in this one.

    Copies have the addresses that they have here.
    """
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (most, most))
