"""Builds the fake CUDA for the torch of this Python, a CUDA wheel, and starts processes that see it.

python -m tests.fake_cuda.build         builds, and prints the folder; exit code 2 where something lacks
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import torch

HERE = pathlib.Path(__file__).parent
REPO = HERE.parent.parent
SITE = pathlib.Path(torch.__file__).parents[1]  # of the wheels: torch, triton, nvidia
FOLDER = REPO / ".fake-cuda" / f"torch-{torch.__version__}"
LIBRARY = FOLDER / "lib/libcuda.so.1"  # the one library that holds all of it
CACHE = (
    FOLDER / "cache"
)  # of compiled code: the fake's timings must not choose a real GPU's kernels
SOURCES = ("runtime.c", "driver.c", "nccl.c", "blas_dnn.c", "nvml.c")
HEADERS = ("cuda_runtime_api.h", "cublasLt.h", "cudnn_graph.h", "nccl.h")
# guards of headers that others include, that need C++ and that nothing here uses
UNUSED_HEADERS = ("__CUDA_FP16_H__", "__CUDA_BF16_H__", "__CUDA_FP8_H__")
FAKED = re.compile(
    r"(__)?(cuda|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl)[A-Z]\w*|cublas\w+"
)
MATMUL = re.compile(r"cublas(Lt)?[A-Z]?\w*([gG]emm|Matmul$)|cublas[SDCZ]gem[mv]\w*")


class CannotBuild(Exception):
    """What this machine or this torch lacks, in one line."""


def build() -> pathlib.Path:
    """The folder of the fake, built unless it is newer than its sources."""
    if torch.version.cuda is None:
        raise CannotBuild(
            f"{sys.executable} has torch {torch.__version__}, which is built for CPUs; PYTHON=... names "
            "a Python whose torch is built for CUDA"
        )
    inputs = [*HERE.glob("*.[ch]"), pathlib.Path(__file__)]
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return FOLDER
    for program in ("gcc", "nm"):
        if not shutil.which(program):
            raise CannotBuild(f"no {program} here: the fake CUDA is C (Debian: apt install gcc)")
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-O1", "-fPIC", "-Wall", "-Werror", f"-DFAKE_CUDNN_VERSION={cudnn_version()}"]
    flags += [f"-D{guard}" for guard in UNUSED_HEADERS]
    for folder in include_folders():
        flags += ["-isystem", str(folder)]
    objects = [compile_source(HERE / name, flags) for name in SOURCES]
    stubs = FOLDER / "stubs.c"
    stubs.write_text(stubs_of(objects))
    objects.append(compile_source(stubs, [*flags, f"-I{HERE}"]))
    # Written next to it and renamed: processes of another test may have it loaded.
    new = LIBRARY.with_suffix(".new")
    run("gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", new, *objects, "-ldl", "-lpthread")
    new.rename(LIBRARY)
    for name in ("libcuda.so", "libnvidia-ml.so.1"):
        link = LIBRARY.with_name(name)
        link.unlink(missing_ok=True)
        link.symlink_to(LIBRARY.name)
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


def cudnn_version() -> int:
    """The version of cuDNN that torch was compiled with: it refuses an older one."""
    major, minor, patch = torch._C._cudnn.getCompileVersion()
    return major * 10_000 + minor * 100 + patch


def include_folders() -> list[pathlib.Path]:
    """Where the wheels that torch requires have the headers. Triton's folder is last: it holds those
    that the CUDA runtime's wheel leaves out, perhaps of another version of CUDA."""
    folders = []
    for header in HEADERS:
        found = sorted((SITE / "nvidia").rglob(f"include/{header}"))
        if not found:
            raise CannotBuild(
                f"{SITE}/nvidia has no {header}: are CUDA's wheels installed with torch?"
            )
        folders.append(found[0].parent)
    return [*folders, SITE / "triton/backends/nvidia/include"]


def stubs_of(objects: list[pathlib.Path]) -> str:
    """C of functions that return 0, for each that torch or Triton may call and the objects do not
    define."""
    defined = symbols("--defined-only", objects)
    wanted = symbols("--undefined-only", (SITE / "torch/lib").glob("*.so"), "-D")
    names = {name for name in wanted if FAKED.fullmatch(name)}
    names |= driver_functions() | nvml_functions()
    lines = ['#include "fake.h"']
    for name in sorted(names - defined):
        if re.search("String|Name$", name):
            lines.append(f'const char *{name}(void) {{ return "fake"; }}')
        elif MATMUL.match(name):
            lines.append(f"int {name}(void) {{ fake_count(MATMULS); return 0; }}")
        else:
            lines.append(f"int {name}(void) {{ return 0; }}")
    return "\n".join([*lines, ""])


def symbols(which: str, files: object, *options: str) -> set[str]:
    names = set()
    for file in files:
        lines = run("nm", *options, which, file).splitlines()
        names |= {line.split()[-1].split("@")[0] for line in lines if line.split()}
    return names


def driver_functions() -> set[str]:
    """The driver's functions, by the names that libraries export: a macro may append a version."""
    text = (SITE / "triton/backends/nvidia/include/cuda.h").read_text()
    names = set(re.findall(r"CUDAAPI (cu[A-Z]\w*)\(", text))
    renamed = dict(re.findall(r"#define (cu[A-Z]\w*)\s+(?:__CUDA_API_PT\w+\()?(cu[A-Z]\w*)", text))
    return names | {renamed[name] for name in names & renamed.keys()}


def nvml_functions() -> set[str]:
    """Those that torch's allocator asks for by name."""
    text = (SITE / "torch/lib/libc10_cuda.so").read_bytes()
    return {name.decode() for name in re.findall(rb"\bnvml[A-Z]\w+", text)}


def environment(cache: pathlib.Path = CACHE, **settings: object) -> dict[str, str]:
    """A process's environment variables that make it see the fake. settings: those of README.md,
    without FAKE_CUDA_, in lower case."""
    variables = {
        **os.environ,
        "LD_PRELOAD": str(LIBRARY),
        "LD_LIBRARY_PATH": f"{LIBRARY.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        "TRITON_LIBCUDA_PATH": str(LIBRARY.parent),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as run_train.sh sets it
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # two tests run at a time
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PATH": f"{HERE}/bin:{os.environ['PATH']}",
    }
    for name, value in settings.items():
        variables[f"FAKE_CUDA_{name.upper()}"] = str(value)
    return variables


def main() -> int:
    try:
        print(build())
    except CannotBuild as error:
        print(f"tests.fake_cuda.build: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
