"""Imported by every Python process of a check: at a signal it writes its stacks into the check's log."""

import faulthandler
import os
import signal
import sys
from contextlib import suppress

if "GPU_CHECK_LOG" in os.environ and (number := int(os.environ["GPU_CHECK_SIGNAL"])) in signal.valid_signals():
    # open as long as the process; the handler needs no interpreter, so it also works in code that holds the lock
    faulthandler.register(number, file=os.open(os.environ["GPU_CHECK_LOG"], os.O_WRONLY | os.O_APPEND))

# the environment's own file of this name comes next
own, folder = sys.modules.pop(__name__), os.path.dirname(__file__)
sys.path.remove(folder)
with suppress(ImportError):
    import sitecustomize  # noqa: F401
sys.path.insert(0, folder)  # Ray's workers have the driver's paths
sys.modules.setdefault(__name__, own)
