"""Builds the fake CUDA for the torch of this Python, a CUDA wheel, and starts processes that see it.

python -m tests.fake_cuda.build         builds, and prints the folder; exit code 2 where something lacks
"""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import torch

HERE = pathlib.Path(__file__).parent
REPO = HERE.parent.parent
SITE = pathlib.Path(torch.__file__).parents[1]  # of the wheels: torch, triton, nvidia
TRITON = SITE / "triton/backends/nvidia/include"
FOLDER = REPO / ".fake-cuda" / f"torch-{torch.__version__}"
LIBRARY = FOLDER / "lib/libcuda.so.1"  # the one library that holds all of it
CACHE = FOLDER / "cache"  # of compiled code: the fake's timings choose no real GPU's kernels
SOURCES = ("runtime.c", "driver.c", "nccl.c", "blas_dnn.c", "nvml.c")
HEADERS = ("cuda_runtime_api.h", "cublasLt.h", "cudnn_graph.h", "nccl.h")
# guards of headers that others include, that need C++ and that nothing here uses
UNUSED = ("__CUDA_FP16_H__", "__CUDA_BF16_H__", "__CUDA_FP8_H__")
LIBRARIES = "cuda|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl"
FAKED = re.compile(rf"(__)?({LIBRARIES})[A-Z]\w*|cublas\w+")
MATMUL = re.compile(r"cublas(Lt)?[A-Z]?\w*([gG]emm|Matmul$)|cublas[SDCZ]gem[mv]\w*")


class CannotBuild(Exception):
    """What this machine or this torch lacks, in one line."""


def build() -> pathlib.Path:
    """The folder of the fake, built unless it is newer than its sources."""
    if torch.version.cuda is None:
        problem = f"{sys.executable} has torch {torch.__version__}, which is built for CPUs"
        raise CannotBuild(f"{problem}; PYTHON=... names a Python whose torch is built for CUDA")
    inputs = [*HERE.glob("*.[ch]"), pathlib.Path(__file__)]
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return FOLDER
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    major, minor, patch = torch._C._cudnn.getCompileVersion()  # torch refuses an older one
    flags = [f"-DFAKE_CUDNN_VERSION={major * 10_000 + minor * 100 + patch}"]
    flags += [f"-D{guard}" for guard in UNUSED]
    for header in HEADERS:  # in the wheels that torch requires
        flags += ["-isystem", str(min((SITE / "nvidia").rglob(f"include/{header}")).parent)]
    # Triton's are last: what CUDA's wheel leaves out, perhaps of another version
    flags += ["-isystem", str(TRITON), f"-I{HERE}", "-O1", "-fPIC", "-Wall", "-Werror"]
    objects = [compile_source(HERE / name, flags) for name in SOURCES]
    stubs = FOLDER / "stubs.c"
    stubs.write_text(stubs_of(objects))
    objects.append(compile_source(stubs, flags))
    # Written next to it and renamed: processes of another test may have it loaded.
    new = LIBRARY.with_suffix(".new")
    run("gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", new, *objects, "-ldl", "-lpthread")
    new.rename(LIBRARY)
    for name in ("libcuda.so", "libnvidia-ml.so.1"):
        LIBRARY.with_name(name).unlink(missing_ok=True)
        LIBRARY.with_name(name).symlink_to(LIBRARY.name)
    return FOLDER


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def compile_source(path: pathlib.Path, flags: list[str]) -> pathlib.Path:
    compiled = FOLDER / f"{path.stem}.o"
    run("gcc", *flags, "-c", path, "-o", compiled)
    return compiled


def stubs_of(objects: list[pathlib.Path]) -> str:
    """C of functions that return 0, for each that torch or Triton may call and the objects do not define."""
    wanted = symbols("--undefined-only", (SITE / "torch/lib").glob("*.so"), "-D")
    names = {name for name in wanted if FAKED.fullmatch(name)}
    # the driver's, by the names that libraries export: a macro may append a version
    text = (TRITON / "cuda.h").read_text()
    driver = set(re.findall(r"CUDAAPI (cu[A-Z]\w*)\(", text))
    renamed = dict(re.findall(r"#define (cu[A-Z]\w*)\s+(?:__CUDA_API_PT\w+\()?(cu[A-Z]\w*)", text))
    names |= driver | {renamed[name] for name in driver & renamed.keys()}
    # NVML's, which torch's allocator asks for by name
    allocator = (SITE / "torch/lib/libc10_cuda.so").read_bytes()
    names |= {name.decode() for name in re.findall(rb"\bnvml[A-Z]\w+", allocator)}
    lines = ['#include "fake.h"']
    for name in sorted(names - symbols("--defined-only", objects)):
        if re.search("String|Name$", name):
            lines.append(f'const char *{name}(void) {{ return "fake"; }}')
        else:
            count = "fake_count(MATMULS); " if MATMUL.match(name) else ""
            lines.append(f"int {name}(void) {{ {count}return 0; }}")
    return "\n".join([*lines, ""])


def symbols(which: str, files: Iterable[pathlib.Path], *options: str) -> set[str]:
    names = set()
    for file in files:
        lines = run("nm", *options, which, file).splitlines()
        names |= {line.split()[-1].split("@")[0] for line in lines if line.split()}
    return names


def environment(cache: pathlib.Path = CACHE, **settings: object) -> dict[str, str]:
    """A process's environment variables that make it see the fake. settings: those of README.md, without FAKE_CUDA_, in
    lower case."""
    path = f"{LIBRARY.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return {
        **os.environ,
        "LD_PRELOAD": str(LIBRARY),
        "LD_LIBRARY_PATH": path,
        "TRITON_LIBCUDA_PATH": str(LIBRARY.parent),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as run_train.sh sets it
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # two tests run at a time
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PATH": f"{HERE}/bin:{os.environ['PATH']}",
        **{f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()},
    }


def python(*words: object, **options: Any) -> str:
    """What a command of this Python prints."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_alone(path: pathlib.Path, gpus: int, *options: str, **settings: Any) -> tuple[dict, str]:
    """Trains it as rank 0 of `gpus`. Returns rank.py's report, and what was printed. settings: of environment()."""
    report = path.with_suffix(".report.json")
    words = ["-m", "tests.fake_cuda.rank", "--alone", gpus, "--report", report, path, *options]
    printed = python(*words, env=environment(devices=min(gpus, 8), **settings))
    return json.loads(report.read_text()), printed


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as error:
        print(f"tests.fake_cuda.build: {error}", file=sys.stderr)
        sys.exit(2)
