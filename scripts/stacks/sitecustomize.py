"""Imported by every Python process of a check: at a signal it writes its stacks into a file of its own."""

import faulthandler
import os
import sys
from contextlib import suppress


def listen() -> None:  # with a handler that needs no interpreter: code that hangs may hold its lock
    with suppress(OSError):  # the check has just ended
        path = f"{os.environ['GPU_CHECK_STACKS']}/{os.getpid()}"
        faulthandler.register(int(os.environ["GPU_CHECK_SIGNAL"]), file=os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


if "GPU_CHECK_STACKS" in os.environ:
    listen()
    os.register_at_fork(after_in_child=listen)

# the environment's own file of this name comes next
own, folder = sys.modules.pop(__name__), os.path.dirname(__file__)
sys.path.remove(folder)
with suppress(ImportError):
    import sitecustomize  # noqa: F401
sys.path.insert(0, folder)  # Ray's workers have the driver's paths
sys.modules.setdefault(__name__, own)
