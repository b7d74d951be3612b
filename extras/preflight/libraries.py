"""NCCL, cuDNN and cuBLAS: torch brings those that it was built with, and a cluster's module, or
LD_PRELOAD, may put others in their place."""

import ctypes
import os
import pathlib
import re
import sys
from collections.abc import Iterator

import config
from extras.preflight.finding import Finding, warning
from run.command import Ranks

NAMES = re.compile(r"lib(nccl|cudnn|cublas|cublasLt)\.so\.\d+")
LOADED = pathlib.Path("/proc/self/maps")


def replaced_libraries(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """Of this process, which has loaded what the ranks will load."""
    own = libraries_of_torch()
    for path in loaded_files():
        file = own.get(library_of(path))
        if file and not file.samefile(path):
            yield warning(
                f"{path}{version_of_nccl(path)} is loaded in place of torch's own "
                f"{file}{version_of_nccl(file)}: {variables()}; unset it, or unload its module"
            )


def parts_of_cudnn(cfg: config.Config, ranks: Ranks) -> Iterator[Finding]:
    """cuDNN loads its parts when it needs them, those of LD_LIBRARY_PATH first, and parts of
    different versions refuse to work together."""
    own = libraries_of_torch()
    cudnn = own.get("libcudnn.so.9")
    if cudnn is None:
        return
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        others = sorted(pathlib.Path(folder).glob("libcudnn_*.so.9")) if folder else []
        if others and not cudnn.parent.samefile(folder):
            yield warning(
                f"LD_LIBRARY_PATH: {others[0]} comes before the part of torch's own cuDNN, in "
                f"{cudnn.parent}; unset it, or unload its module"
            )
            return


def libraries_of_torch() -> dict[str, pathlib.Path]:
    """The libraries of NVIDIA's packages next to torch, by file name; none where torch was built
    with those of the system, or is not loaded: without GPUs."""
    if "torch" not in sys.modules:
        return {}
    packages = pathlib.Path(sys.modules["torch"].__file__ or "").parent.parent
    libraries = {}
    for path in packages.glob("nvidia/*/lib/lib*.so.*"):
        if library_of(path) == path.name:
            libraries[path.name] = path
    return libraries


def loaded_files() -> list[pathlib.Path]:
    """The files of these libraries that this process has loaded."""
    try:
        lines = LOADED.read_text().splitlines()
    except OSError:
        return []
    files = set()
    for line in lines:
        path = pathlib.Path(line.partition("/")[1] + line.partition("/")[2])
        if path.is_absolute() and library_of(path) and path.exists():
            files.add(path)
    return sorted(files)


def library_of(path: pathlib.Path) -> str:
    """The name by which a library is loaded: libnccl.so.2 of libnccl.so.2.18.3, to which the link
    of that name leads in a package of a distribution, or a module. "" for other files."""
    match = NAMES.match(path.name)
    return match[0] if match else ""


def version_of_nccl(path: pathlib.Path) -> str:
    """ " (2.27.3)"; nothing for other libraries."""
    if not path.name.startswith("libnccl"):
        return ""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f" ({number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100})"


def variables() -> str:
    """The variables that may have done it."""
    given = []
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        if os.environ.get(name):
            given.append(f"{name}={os.environ[name]}")
    return ", ".join(given) or "ldconfig lists it first"
