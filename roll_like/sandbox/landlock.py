"""The Landlock backend, for machines without user namespaces. Weaker; used only if it is selected by name.

A program gets one thread, can write no file, read nothing but the interpreter's folders, open no socket, signal
no process and start none. Unlike in a namespace it shares the machine's process numbers, its clock and host name,
can ask whether a path exists, and its user id is that of whoever started it (an unused one where that is root).
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from roll_like.sandbox.box import SandboxUnavailable
from roll_like.sandbox.bwrap import PythonBox, ZygotePool, unused_id
from roll_like.sandbox.numpy_only import numpy_folder
from roll_like.sandbox.rootfs import interpreter_path
from roll_like.sandbox.seccomp import filter_program
from roll_like.sandbox.zygote import Zygote

_CONTROL = "@control@"
HELP = "Linux 6.2 or newer with Landlock enabled (lsm=landlock,… on the kernel's command line), or install bubblewrap"


class LandlockBox(PythonBox):
    """Python without files to write, threads or processes."""

    name = "landlock"

    def __init__(self, *, workers: int = 2, numpy: bool = False) -> None:
        super().__init__(ZygotePool(partial(start_confined, numpy=numpy), workers=workers, recycle=1))


def start_confined(*, numpy: bool = False) -> Zygote:
    """Start a process that serves one execution; blocks.

    Args:
        numpy: Whether programs may import NumPy, which is loaded before they are confined.

    Raises:
        SandboxUnavailable: The kernel has no Landlock, or one that is too old.
    """
    root = os.geteuid() == 0
    folder = str(Path(__file__).parents[2])
    start = f"import sys; sys.path.insert(0, {folder!r}); sys.dont_write_bytecode = True\n"
    start += _WITHOUT_PACKAGE.format(here=str(Path(__file__).parent))
    command = [interpreter_path(), "-I", "-S", "-X", "utf8", "-c", f"{start}main({_CONTROL}, {folder!r})"]
    library = os.path.dirname(os.path.realpath(os.__file__))
    config = {"uid": unused_id() if root else None, "library": library, "readable": readable_paths(library)}
    config["numpy"] = numpy_folder() if numpy else None
    try:
        return Zygote.start(command, seccomp=filter_program("landlock"), control=_CONTROL, config=config)
    except SandboxUnavailable as error:
        raise SandboxUnavailable(error.message, fix=HELP) from error


def readable_paths(library: str) -> list[str]:
    """Return what a program may read: the standard library, shared libraries and two devices."""
    own = [os.path.join(library, name) for name in os.listdir(library) if name not in {"site-packages", "test"}]
    wanted = [*own, interpreter_path(), "/lib", "/lib64", "/usr/lib", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    return [path for path in wanted if os.path.exists(path)]


#: The package's own `__init__` needs what `-S` hides; inside it is a plain folder of modules.
_WITHOUT_PACKAGE = """
import types
for name, path in (("roll_like", "{here}/.."), ("roll_like.sandbox", "{here}")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from roll_like.sandbox.landlock_main import main
"""
