"""What a box sees of this machine's files: an interpreter and its libraries, read-only, and nothing else."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

from roll_like.sandbox.box import SandboxUnavailable

#: Where the box's own files lie inside.
BOX = "/box"
#: The interpreter inside.
PYTHON = f"/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"

#: Libraries of the interpreter's own, where the system's are mounted as a whole.
_SHARED = "/python/shared"
_INSIDE = ("codec.py", "kernel.py", "numpy_only.py", "worker.py", "zygote_main.py")
#: NumPy inside, where it is asked for.
NUMPY = "/python/packages/numpy"
_DEVICES = ("null", "random", "urandom")

#: Loads the standard library's extension modules, so that what they are linked with is in the memory map.
_LIST_LIBRARIES = """
import ctypes, os, sys, sysconfig
skipped = ("_tkinter", "_curses", "readline", "_test", "_dbm", "_gdbm", "nis")
folder = sysconfig.get_config_var("DESTSHARED") or ""
for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
    if name.endswith(".so") and not name.startswith(skipped):
        try:
            ctypes.CDLL(os.path.join(folder, name))
        except OSError:
            pass
for top, _, names in os.walk(sys.argv[1]) if len(sys.argv) > 1 else ():
    for name in names:
        if name.endswith(".so"):
            try:
                ctypes.CDLL(os.path.join(top, name))
            except OSError:
                pass
for line in open("/proc/self/maps"):
    path = line.rstrip("\\n").partition("/")[2]
    if path:
        print("/" + path)
"""


def interpreter_path() -> str:
    """Return the interpreter outside any virtual environment, every link followed."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def interpreter_mounts(*, beside_system: bool = False, numpy: str | None = None) -> tuple[str, ...]:
    """Return bubblewrap arguments that bring the interpreter, its standard library and their shared libraries.

    Args:
        beside_system: The system's libraries are there already (`compiler_mounts`).

    Raises:
        SandboxUnavailable: The interpreter does not start by itself.
    """
    executable = interpreter_path()
    try:
        listing = subprocess.run(
            [executable, "-I", "-S", "-c", _LIST_LIBRARIES, *([numpy] if numpy else [])],
            capture_output=True,
            text=True,
            check=False,
            env={},
        )
    except OSError as error:
        raise SandboxUnavailable(
            f"{executable} cannot be started by user {os.geteuid()}: {error.strerror}",
            fix="use a Python that this user may read and execute",
        ) from error
    if listing.returncode:
        raise SandboxUnavailable(f"{executable} does not start: {listing.stderr[-500:]}", fix="reinstall Python")
    library = os.path.dirname(os.path.realpath(os.__file__))
    inside = f"/python/{sys.platlibdir}/{PYTHON.rpartition('/')[2]}"
    arguments = [*folders("/python/bin", os.path.dirname(inside))]
    arguments += ["--ro-bind", executable, PYTHON, "--ro-bind", library, inside]
    for hidden in ("site-packages", "dist-packages", "test"):
        if os.path.isdir(os.path.join(library, hidden)):
            arguments += ["--tmpfs", f"{inside}/{hidden}", "--remount-ro", f"{inside}/{hidden}"]
    loader = elf_interpreter(executable)
    paths = {os.path.realpath(path) for path in listing.stdout.splitlines() if os.path.isfile(path)}
    mounted = (library + os.sep, *((numpy + os.sep, f"{numpy}.libs{os.sep}") if numpy else ()))
    libraries = {path for path in paths if ".so" in os.path.basename(path) and not path.startswith(mounted)}
    system = _library_folder(libraries)
    if beside_system:
        libraries = {path for path in libraries if os.path.dirname(path) != system}
        loader, system = None, _SHARED
        arguments += ["--setenv", "LD_LIBRARY_PATH", _SHARED]
    arguments += folders(system)
    for path in sorted(libraries):
        arguments += ["--ro-bind", path, os.path.join(system, os.path.basename(path))]
        if (name := _shared_object_name(path)) and name != os.path.basename(path):
            arguments += ["--symlink", os.path.basename(path), os.path.join(system, name)]
    if numpy:
        arguments += [*folders(os.path.dirname(NUMPY)), "--ro-bind", numpy, NUMPY]
        arguments += ["--ro-bind-try", f"{numpy}.libs", f"{NUMPY}.libs"]  # a wheel's own libraries
    if loader is not None:
        arguments += [*folders(os.path.dirname(loader)), "--ro-bind", os.path.realpath(loader), loader]
    return tuple(arguments)


def compiler_mounts() -> tuple[str, ...]:
    """Return bubblewrap arguments that bring the system's programs, for languages other than Python."""
    arguments = ["--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local", "--remount-ro", "/usr/local"]
    for name in ("bin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    arguments += folders("/etc", "/node/bin")
    for path in (Path("/etc/alternatives"), Path("/etc/ld.so.cache")):
        if path.exists():
            arguments += ["--ro-bind", str(path), str(path)]
    if node := shutil.which("node"):
        arguments += ["--ro-bind", os.path.realpath(node), "/node/bin/node"]
    return tuple(arguments)


def box_mounts(tmp_bytes: int) -> tuple[str, ...]:
    """Return bubblewrap arguments that bring the box's own files, devices and a small /tmp."""
    here = Path(__file__).parent
    arguments = folders(f"{BOX}/roll_like/sandbox")
    for name in _INSIDE:
        arguments += ["--ro-bind", str(here / name), f"{BOX}/roll_like/sandbox/{name}"]
    arguments += ["--tmpfs", "/dev"]
    for name in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    # glibc keeps shared memory and semaphores in /dev/shm; here they share /tmp's limit
    arguments += ["--symlink", "/tmp", "/dev/shm"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        arguments += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    arguments += ["--remount-ro", "/dev", "--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    return (*arguments, "--proc", "/proc", "--remount-ro", "/", "--chdir", "/")


def folders(*paths: str) -> list[str]:
    """Return bubblewrap arguments that make folders which anybody can enter; by itself it makes them private."""
    chains = ([*list(Path(path).parents)[-2::-1], Path(path)] for path in paths)
    wanted = dict.fromkeys(str(folder) for chain in chains for folder in chain)
    return [word for path in wanted for word in ("--perms", "0755", "--dir", path)]


def elf_interpreter(executable: str) -> str | None:
    """Return the path of the loader that a 64-bit executable asks for; None for a static one."""
    with open(executable, "rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            raise SandboxUnavailable(f"{executable} is no 64-bit ELF executable", fix="use a 64-bit Python on Linux")
        (table,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        for index in range(count):
            file.seek(table + index * size)
            entry = file.read(size)
            if struct.unpack_from("<I", entry)[0] == 3:  # PT_INTERP
                offset, _, _, length = struct.unpack_from("<QQQQ", entry, 8)
                file.seek(offset)
                return file.read(length).rstrip(b"\0").decode()
    return None


def _library_folder(libraries: set[str]) -> str:
    """Return the folder of the C library: the loader searches it without being told."""
    for path in sorted(libraries):
        if os.path.basename(path).startswith(("libc.so", "libc-", "libc.musl")):
            return os.path.dirname(path)
    raise SandboxUnavailable("the interpreter is linked with no C library that is known", fix="use a Python for glibc")


def _shared_object_name(path: str) -> str | None:
    """Return the name under which others are linked with a library: its link beside it, as in libz.so.1."""
    name = os.path.basename(path)
    stem, _, version = name.partition(".so.")
    return f"{stem}.so.{version.partition('.')[0]}" if version else None
