"""Build the library that stands in for CUDA, once for each state of its sources and each torch."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILDS = ROOT / "build" / "phantom"
PARTS = ("runtime", "libraries", "nccl")
HEADERS = ("nvidia/cu13", "nvidia/cudnn", "nvidia/nccl", "triton/backends/nvidia")
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Wno-attributes",
    "-fvisibility=hidden",
    "-pthread",
)

OF_CUDA = re.compile(
    r"(__cuda|cuda|cudnn|cublas|nccl|cufft|cusparse|cusolver|cupti|cu[A-Z]|cuFile)"
)
ON_TWO_RANKS = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    "--no-python",
    sys.executable,
    "-c",
)
"""Arguments of Python before a program that two ranks run."""


class CannotBuildError(unittest.SkipTest):
    """What is missing for a phantom, in a sentence. A test that raises it is skipped."""


def library():
    """The folder with `libphantom_cuda.so`; builds it if there is none.

    Raises:
        CannotBuildError: without gcc, or without a torch for CUDA 13.
    """
    site = Path(sysconfig.get_paths()["purelib"])
    if shutil.which("g++") is None or shutil.which("nm") is None:
        raise CannotBuildError("a phantom GPU needs g++ and binutils, which are not installed")
    if not all((site / name / "include").is_dir() for name in HEADERS):
        raise CannotBuildError(
            "a phantom GPU needs the torch for CUDA 13 that pip installs on Linux"
        )
    sources = sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"), HERE / "build.py"))
    content = b"".join(path.read_bytes() for path in sources) + version("torch").encode()
    folder = BUILDS / hashlib.sha256(content).hexdigest()[:16]
    if not folder.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as unfinished:
            _build(Path(unfinished), site)
            try:
                Path(unfinished).rename(folder)
            except OSError:  # another process was faster
                assert folder.exists()
            else:
                Path(unfinished).mkdir()
    return folder


def environment(**settings):
    """The environment of a process with phantom GPUs.

    Args:
        settings: those of README.md, in lower case and without `PHANTOM_`.

    Raises:
        CannotBuildError: as `library`.
    """
    folder = library()
    given = {f"PHANTOM_{name.upper()}": str(value) for name, value in settings.items()}
    paths = {"LD_PRELOAD": str(folder / "libphantom_cuda.so"), "LD_LIBRARY_PATH": str(folder)}
    for name, path in paths.items():
        before = [part for part in os.environ.get(name, "").split(":") if part not in ("", path)]
        given[name] = ":".join([path, *before])
    return {**os.environ, **given}


def on_phantoms(*arguments, **settings):
    """What Python prints with these arguments, on GPUs of its own.

    Args:
        arguments: such as `"-c", program`.
        settings: as for `environment`.
    """
    with tempfile.TemporaryDirectory(prefix="phantom-", dir="/dev/shm") as folder:
        env = {**environment(dir=folder, **settings), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *arguments],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _build(folder, site):
    include = [f"-I{HERE}", *(f"-isystem{site / name / 'include'}" for name in HEADERS)]
    compilers = [
        subprocess.Popen(
            ["g++", *FLAGS, *include, "-c", HERE / f"{part}.cpp", "-o", folder / f"{part}.o"]
        )
        for part in PARTS
    ]
    if sum(compiler.wait() != 0 for compiler in compilers):
        raise RuntimeError("the phantom's sources do not compile")
    objects = [folder / f"{part}.o" for part in PARTS]
    (folder / "stubs.c").write_text(_stubs(site / "torch" / "lib", objects))
    stubs = folder / "stubs.o"
    subprocess.run(["gcc", "-O1", "-fPIC", "-w", "-c", folder / "stubs.c", "-o", stubs], check=True)
    linked = folder / "libphantom_cuda.so"
    subprocess.run(
        ["g++", "-shared", "-o", linked, *objects, stubs, "-ldl", "-pthread"], check=True
    )
    for name in (
        "libcuda.so.1",
        "libnvidia-ml.so.1",
    ):  # by which torch and others open the driver and NVML
        (folder / name).symlink_to(linked.name)


def _stubs(torch_libraries, objects):
    """A function for each one of CUDA that torch's libraries need and the phantom does not define."""
    needed = set()
    for path in sorted(torch_libraries.glob("lib*.so*")):
        if re.match(r"lib(torch|c10|caffe2)", path.name) and "nvshmem" not in path.name:
            needed |= {
                name for name in _symbols("-D", "--undefined-only", path) if OF_CUDA.match(name)
            }
    defined = set().union(*(_symbols("--defined-only", path) for path in objects))
    lines = [
        f'__attribute__((visibility("default"))) int {name}() {{ static int told; '
        f'if (!told) told = 1, phantom_told("{name}"); return 0; }}\n'
        for name in sorted(needed - defined)
    ]
    return "extern void phantom_told(const char*);\n" + "".join(lines)


def _symbols(*arguments):
    out = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in out.splitlines() if line.split()}
