"""Kernels are found where they were built, can be left out, and must have our structures."""

import ctypes
import os
import shutil
import subprocess
import sys
from ctypes import Structure
from pathlib import Path

import pytest

from kvkeep.compiled import binding
from kvkeep.compiled.binding import kernel_library, require_same_interface
from kvkeep.compiled.instruction_sets import SETS, load_kernels, runs_here
from kvkeep.compiled.structures import STRUCTURES, CLayer, CMatrix
from kvkeep.errors import KernelMismatch

kernels_here = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.skipif(not SETS, reason="no kernels for this architecture")
@pytest.mark.skipif("KVKEEP_KERNELS" in os.environ, reason="kernels of another folder are tested")
def test_a_library_is_built_with_the_package_for_each_set() -> None:
    for name in filter(runs_here, SETS):
        assert load_kernels(name) is not None


def test_kernels_can_be_switched_off() -> None:
    script = "from kvkeep.compiled.binding import kernel_library; assert kernel_library() is None"
    environment = {"KVKEEP_COMPILED": "0"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_kernels_can_be_loaded_from_another_folder(tmp_path: Path) -> None:
    script = "from kvkeep.compiled.binding import kernel_library; assert kernel_library() is None"
    environment = {"KVKEEP_KERNELS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def changed(structure: type[Structure], *fields: tuple[str, type]) -> type[Structure]:
    """Return a structure of the same name with other fields."""
    return type(structure.__name__, (Structure,), {"_fields_": fields})


def swapped(structure: type[Structure], first: str, second: str) -> type[Structure]:
    """Return the structure with two fields in each other's place: of the same size in all."""
    fields, names = list(structure._fields_), [name for name, *_ in structure._fields_]
    i, j = names.index(first), names.index(second)
    fields[i], fields[j] = fields[j], fields[i]
    return changed(structure, *fields)


def resized(structure: type[Structure], name: str, kind: type) -> type[Structure]:
    """Return the structure with one field of another type."""
    return changed(structure, *((n, kind if n == name else t) for n, t in structure._fields_))


CHANGES = {
    "another offset": (swapped(CMatrix, "data", "scales"), "Matrix.scales must have offset 16"),
    "another offset of the same size": (swapped(CLayer, "group", "rotated"), "Layer.rotated"),
    "another size": (resized(CMatrix, "format", ctypes.c_int16), "Matrix.format .* size 2"),
    "a field less": (changed(CMatrix, *CMatrix._fields_[:-1]), "Matrix.bias"),
    "a field more": (changed(CMatrix, *CMatrix._fields_, ("more", ctypes.c_int)), "Matrix.more"),
}


@kernels_here
@pytest.mark.parametrize(("structure", "message"), CHANGES.values(), ids=CHANGES)
def test_a_changed_field_is_refused(
    structure: type[Structure], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = kernel_library()
    assert kernels is not None
    require_same_interface(kernels)
    others = (s for s in STRUCTURES if s.__name__ != structure.__name__)
    monkeypatch.setattr(binding, "STRUCTURES", (structure, *others))
    with pytest.raises(KernelMismatch, match=message):
        require_same_interface(kernels)


@kernels_here
def test_a_structure_that_only_the_kernels_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = kernel_library()
    assert kernels is not None
    monkeypatch.setattr(binding, "STRUCTURES", STRUCTURES[1:])
    with pytest.raises(KernelMismatch, match="the structure Matrix exists only in the kernels"):
        require_same_interface(kernels)


@kernels_here
def test_kernels_of_another_interface_are_left_out_with_a_warning() -> None:
    script = """
import warnings
from kvkeep.compiled import binding
binding.STRUCTURES = binding.STRUCTURES[:-1]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert binding.kernel_library() is None
(message,) = [str(w.message) for w in caught if w.category is RuntimeWarning]
assert "the structure Similarity exists only in the kernels" in message, message
"""
    subprocess.run([sys.executable, "-c", script], check=True)
