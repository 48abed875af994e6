"""Programs that do not end, and programs that want everything there is."""

from __future__ import annotations

from attacks.case import MEMORY, OPEN, OUTPUT, QUICK, RAISED, TIMEOUT, WRONG, WRONG_OR_RAISED, Attack

CALLS = ("call", "assert")


def _endless(name: str, program: str, **options: object) -> Attack:
    fields: dict[str, object] = {"statuses": TIMEOUT, "limits": QUICK, "kinds": ("stdio", "call")} | options
    return Attack(name=name, program=program, **fields)  # type: ignore[arg-type]


TIMEOUTS = [
    _endless("a busy loop", "def solve(x):\n    while True: pass", kinds=("stdio", "call", "assert")),
    _endless("a busy loop at the start", "while True: pass"),
    _endless("a sleep", "import time\ndef solve(x): time.sleep(1000)", kinds=("stdio", "call", "assert")),
    _endless("a pause", "import signal\ndef solve(x): signal.pause()"),
    _endless(
        "every signal ignored",
        "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ndef solve(x):\n    while True: pass",
    ),
    _endless("itself stopped", "import os, signal\ndef solve(x): os.kill(os.getpid(), signal.SIGSTOP)"),
    _endless(
        "exceptions caught for ever",
        "import time\ndef solve(x):\n    while True:\n        try: time.sleep(1000)\n"
        "        except BaseException: pass",
    ),
    _endless(
        "a lock taken twice",
        "import threading\ndef solve(x):\n    a = threading.Lock()\n    a.acquire()\n    a.acquire()",
    ),
    _endless("a regular expression without end", "import re\ndef solve(x): re.match('(a+)+$', 'a' * 40 + 'b')"),
    _endless("a power without end", "def solve(x): return 10 ** 10 ** 8 % 7"),
    _endless(
        "a thread that does not end",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "def solve(x): return 'wrong'",
        kinds=("stdio",),
    ),
    _endless(
        "an exit function without end",
        "import atexit, time\natexit.register(time.sleep, 1000)\ndef solve(x): return 1",
        expected=1,
        kinds=("stdio", "call", "assert"),
    ),
    _endless(
        "a child in a session of its own that holds the output",
        "import os, time\ndef solve(x):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(1000)\n        os._exit(0)\n    return 'wrong'",
        statuses=TIMEOUT | WRONG_OR_RAISED,
        kinds=("stdio", "call", "assert"),
    ),
    _endless(
        "CPU time spread over children",
        "import os\ndef solve(x):\n    for _ in range(3): os.fork()\n    while True: pass",
    ),
]


def _flood(name: str, program: str, **options: object) -> Attack:
    fields: dict[str, object] = {"kinds": ("stdio", "call"), "expected": OPEN} | options
    return Attack(name=name, program=program, **fields)  # type: ignore[arg-type]


_REFUSED = """
def solve(x):
    try:
        return attempt()
    except (OSError, RuntimeError, ValueError) as error:
        return "refused: " + repr(error)[:100]
"""

FLOODS = [
    _flood("one large array", "def solve(x): bytearray(4 << 30); return 'OPEN'", statuses=MEMORY),
    _flood("a list that grows", "def solve(x):\n    a = []\n    while True: a.append(bytes(1 << 16))", statuses=MEMORY),
    _flood(
        "memory errors caught",
        "def solve(x):\n    a = []\n    while len(a) < 4096:\n        try: a.append(bytearray(1 << 20))\n"
        "        except MemoryError: a.append(0)\n    return 'OPEN' if sum(map(bool, a)) > 1000 else 'refused'",
        statuses=MEMORY | WRONG | TIMEOUT,
    ),
    _flood(
        "memory of many processes",
        "import os, time\ndef solve(x):\n    for _ in range(6):\n        if os.fork() == 0:\n"
        "            keep = b'x' * (60 << 20)\n            time.sleep(1000)\n    time.sleep(2)\n    return 'OPEN'",
        statuses=MEMORY | RAISED,
    ),
    _flood(
        "memory shared without a name",
        "import mmap" + _REFUSED + "def attempt():\n    keep = [mmap.mmap(-1, 32 << 20) for _ in range(32)]\n"
        "    for area in keep: area[:] = b'x' * len(area)\n    return 'OPEN'",
        statuses=WRONG | MEMORY,
    ),
    _flood(
        "a file in memory",
        "import os" + _REFUSED + "def attempt():\n    number = os.memfd_create('x')\n"
        "    for _ in range(512): os.write(number, bytes(1 << 20))\n    return 'OPEN'",
        statuses=WRONG | MEMORY,
    ),
    _flood(
        "System V shared memory",
        "import ctypes" + _REFUSED + "def attempt():\n    libc = ctypes.CDLL(None, use_errno=True)\n"
        "    return 'OPEN' if libc.shmget(0, 1 << 30, 0o1600) >= 0 else 'refused'",
        statuses=WRONG,
    ),
    _flood(
        "/dev/shm filled",
        "import os"
        + _REFUSED
        + "def attempt():\n    for n in range(64):\n        with open(f'/dev/shm/{n}', 'wb') as file:\n"
        "            for _ in range(4): file.write(bytes(1 << 20))\n    return 'OPEN'",
        statuses=WRONG | MEMORY,
    ),
    _flood(
        "/tmp filled with many files",
        "import os"
        + _REFUSED
        + "def attempt():\n    for n in range(64):\n        with open(f'/tmp/{n}', 'wb') as file:\n"
        "            file.write(bytes(1 << 20))\n    return 'OPEN'",
        statuses=WRONG | MEMORY,
    ),
    _flood(
        "one large file",
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)" + _REFUSED + "def attempt():\n"
        "    with open('/tmp/large', 'wb') as file:\n        for _ in range(1024): file.write(bytes(1 << 20))\n"
        "    return 'OPEN'",
        statuses=WRONG | MEMORY,
    ),
    _flood(
        "a file made large without writing",
        "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)" + _REFUSED + "def attempt():\n"
        "    with open('/tmp/large', 'wb') as file: os.posix_fallocate(file.fileno(), 0, 1 << 30)\n    return 'OPEN'",
        statuses=WRONG | MEMORY,
    ),
    _flood(
        "a million empty files",
        "import os"
        + _REFUSED
        + "def attempt():\n    for n in range(10 ** 6): open(f'/tmp/{n}', 'w').close()\n    return 'OPEN'",
        statuses=WRONG | TIMEOUT | MEMORY,
    ),
    _flood(
        "the input's file grown",
        "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)" + _REFUSED + "def attempt():\n"
        "    os.ftruncate(0, 1 << 30)\n    os.pwrite(0, b'x', (1 << 30) - 1)\n    return 'OPEN'",
        statuses=WRONG | MEMORY,
    ),
    _flood(
        "processes without end",
        "import os, time"
        + _REFUSED
        + "def attempt():\n    for n in range(200):\n        if os.fork() == 0: time.sleep(1000)\n"
        "    return 'OPEN'",
        statuses=WRONG | TIMEOUT,
    ),
    _flood(
        "processes that breed",
        "import os\ndef solve(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
        statuses=TIMEOUT | MEMORY,
        limits=QUICK,
    ),
    _flood(
        "threads without end",
        "import threading, time" + _REFUSED + "def attempt():\n    for n in range(200):\n"
        "        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n    return 'OPEN'",
        statuses=WRONG,
    ),
    _flood("output without end", "def solve(x):\n    while True: print('x' * 1000)", statuses=OUTPUT),
    _flood(
        "standard error without end",
        "import sys\ndef solve(x):\n    while True: print('x' * 1000, file=sys.stderr)",
        statuses=OUTPUT,
    ),
    _flood(
        "output from a child after the end",
        "import os\ndef solve(x):\n    if os.fork() == 0:\n        while True: os.write(1, b'x' * 4096)\n"
        "    return 'wrong'",
        statuses=OUTPUT | WRONG,
    ),
    _flood("a result of 100 MB", "def solve(x): return 'x' * (30 << 20)", statuses=RAISED | MEMORY, kinds=CALLS),
    _flood(
        "an exception with a message of 30 MB",
        "def solve(x): raise ValueError('x' * (30 << 20))",
        statuses=RAISED | OUTPUT,
        kinds=("stdio", "call", "assert"),
    ),
    _flood("recursion in Python without end", "def solve(x): return solve(x)", statuses=RAISED),
    _flood(
        "recursion with the limit raised",
        "import sys\nsys.setrecursionlimit(1 << 30)\ndef solve(x): return solve(x)",
        statuses=RAISED | MEMORY,
    ),
    _flood(
        "recursion in C",
        "import sys\nsys.setrecursionlimit(1 << 30)\ndef solve(x):\n    a = []\n"
        "    for _ in range(10 ** 6): a = [a]\n    return repr(a)[:1]",
        statuses=RAISED | MEMORY | TIMEOUT,
    ),
    _flood(
        "descriptors without end",
        "import os" + _REFUSED + "def attempt():\n    keep = [os.pipe() for _ in range(5000)]\n    return 'OPEN'",
        statuses=WRONG,
    ),
    _flood(
        "source that takes the compiler's memory",
        "x = " + "(" * 90 + "1," * 5 + ")" * 90 + "\ndef solve(x): return 'wrong'",
        statuses=WRONG | RAISED,
    ),
    _flood(
        "constants that are computed while compiling",
        "y = lambda: 10 ** 4000 * 10 ** 4000\ndef solve(x): return 'wrong'",
        statuses=WRONG,
    ),
]
ATTACKS = FLOODS
