"""Stand-ins for the CUDA libraries that a CUDA build of torch is linked with, for a machine without a GPU.

    python .ci/cuda_stubs.py SITE_PACKAGES

Each library has the functions that torch names, and each of these aborts when it is called. Needs gcc and nm.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

LIBRARIES = {  # how their functions' names begin, of libraries whose symbols have no version with the library's name
    "libnccl.so.2": "nccl",
    "libcusparseLt.so.0": "cusparseLt",
    "libcufile.so.0": "cuFile",
    "libcurand.so.10": "curand",
    "libnvshmem_host.so.3": "nvshmem",
}
REAL = ("libcudart.so", "libcupti.so")  # small enough to be installed, whatever their version


def needed(torch_libraries: pathlib.Path) -> dict[str, dict[str, set[str]]]:
    """Functions that torch's libraries lack, by library and version of the symbol ("" without one)."""
    lacking = collections.defaultdict(lambda: collections.defaultdict(set))
    for library in LIBRARIES:
        lacking[library][""] = set()
    for library in torch_libraries.glob("*.so"):
        lines = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True)
        for symbol in re.findall(r" U (\S+)$", lines.stdout, re.MULTILINE):
            name, _, version = symbol.partition("@")
            unnamed = (x for x, start in LIBRARIES.items() if name.startswith(start))
            home = version if re.match(r"lib(cu|nv).*\.so", version) else next(unnamed, None)
            if home and not home.startswith(REAL):
                lacking[home][version].add(name)
    return lacking


def make(library: str, functions: dict[str, set[str]], folder: pathlib.Path) -> None:
    """Compile one stand-in."""
    names = sorted(set[str]().union(*functions.values()))
    source = "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
    versions = "".join(f"{v} {{ global: {'; '.join(sorted(x))}; }};\n" for v, x in functions.items() if v)
    with tempfile.TemporaryDirectory() as scratch:
        file, script = pathlib.Path(scratch, "stub.c"), pathlib.Path(scratch, "versions")
        file.write_text(source)
        script.write_text(versions)
        options = [f"-Wl,--version-script={script}"] if versions else []
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}", *options]
        subprocess.run([*command, file, "-o", folder / library], check=True)


def main() -> None:
    """Write the libraries beside torch's own, where these look for them."""
    folder = pathlib.Path(sys.argv[1], "torch", "lib")
    for library, functions in needed(folder).items():
        make(library, functions, folder)


main()
