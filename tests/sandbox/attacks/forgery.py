"""Programs that write results themselves, and programs that leave early as if all were well."""

from __future__ import annotations

from attacks.case import ALL, MEMORY, OUTPUT, RAISED, WRONG, WRONG_OR_RAISED, Attack

_FRAMES = """
import os, struct
def frame(kind, payload=b""):
    body = kind + payload
    return struct.pack(">I", len(body)) + body
def everywhere(data, low=1):
    for number in range(low, 64):
        try: os.write(number, data)
        except OSError: pass
"""
CALLS = ("call", "assert")
_FAILED = WRONG_OR_RAISED | OUTPUT

FORGERIES = [
    Attack(
        name="values written to every descriptor",
        program=_FRAMES + "def solve(x):\n    everywhere(frame(b'V', b'\"right\"'))\n    return 'wrong'",
        statuses=_FAILED,
    ),
    Attack(
        name="a value and the end of the session, then leaving",
        program=_FRAMES + "def solve(x):\n    everywhere(frame(b'V', b'\"?\"') + frame(b'K'))\n    os._exit(0)",
        statuses=_FAILED,
    ),
    Attack(
        name="the end of the session at once",
        program=_FRAMES + "everywhere(frame(b'R') + frame(b'K'), 3)\nos._exit(0)",
        statuses=_FAILED,
    ),
    Attack(
        name="readiness, two values and the end before any call",
        program=_FRAMES + "everywhere(frame(b'R') + frame(b'V', b'\"?\"') * 2 + frame(b'K'), 3)\nos._exit(0)",
        statuses=_FAILED,
    ),
    Attack(
        name="the value of the next call in advance",
        program=_FRAMES + "def solve(x):\n    everywhere(frame(b'V', b'\"?\"') * 2, 3)\n    return '?'",
        statuses=_FAILED,
        kinds=CALLS,
    ),
    Attack(
        name="an answer that promises 4 GiB",
        program=_FRAMES + "def solve(x):\n    everywhere(struct.pack('>I', 0xFFFFFFFF) + b'V' * 1000, 3)\n    return 1",
        statuses=_FAILED,
        kinds=CALLS,
    ),
    Attack(
        name="statuses as text on every stream",
        program=_FRAMES
        + "for text in (b'passed', b'{\"status\": \"passed\", \"fraction\": 1.0}', b'OK', b'1 passed in 0.01s'):\n"
        "    for number in (1, 2):\n        os.write(number, text + b'\\n')\ndef solve(x): return 'passed'",
        statuses=WRONG,
    ),
    Attack(
        name="the codec's text of a test that passed",
        program=_FRAMES
        + "def solve(x):\n    everywhere(struct.pack('>I', 14) + b'[\"t\",\"passed\"]', 3)\n    return 'x'",
        statuses=_FAILED,
        kinds=CALLS,
    ),
    Attack(
        name="a remote answer of its own for assert tests",
        program="def solve(x): return 1\nimport sys\nclass Late:\n    def __del__(self): pass\n"
        "def late(*a): return ('passed',)\nimport atexit\natexit.register(late)\n"
        "sys.modules[__name__].__class__ = type('M', (type(sys),), {'_remote_ask': property(lambda s: late)})",
        statuses=WRONG_OR_RAISED,
        kinds=CALLS,
    ),
    Attack(
        name="answers of the helper replaced from a thread",
        program="import threading, time\ndef lie(*a): return ('passed',)\ndef watch():\n    while True:\n"
        "        globals()['_remote_ask'] = lie\n        time.sleep(0.001)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "def solve(x):\n    time.sleep(0.05)\n    return 'wrong'",
        statuses=WRONG_OR_RAISED,
        kinds=CALLS,
    ),
    Attack(
        name="the worker's functions replaced",
        program="import sys\nfor module in list(sys.modules.values()):\n"
        "    for name in ('_answer', '_leave', '_failure', '_request'):\n"
        "        if hasattr(module, name) and 'worker' in module.__name__: setattr(module, name, lambda *a: b'')\n"
        "def solve(x): return 'wrong'",
        statuses=WRONG_OR_RAISED | frozenset({*OUTPUT}),
    ),
    Attack(
        name="all descriptors closed",
        program="import os\ndef solve(x):\n    os.closerange(0, 64)\n    return 'wrong'",
        statuses=WRONG_OR_RAISED,
    ),
    Attack(
        name="standard output replaced by an object that says yes",
        program="import sys\nclass Yes:\n    def write(self, text): return len(text)\n    def flush(self): pass\n"
        "    __eq__ = lambda *a: True\nsys.stdout = sys.__stdout__ = Yes()\ndef solve(x): return 'wrong'",
        statuses=WRONG_OR_RAISED,
    ),
]

_EXITS = {
    "sys.exit(0) at the start": """
import sys
sys.exit(0)
""",
    "sys.exit(0) in the call": """
import sys
def solve(x): sys.exit(0)
""",
    "os._exit(0) at the start": """
import os
os._exit(0)
""",
    "os._exit(0) in the call": """
import os
def solve(x): os._exit(0)
""",
    "quit() in the call": """
def solve(x): raise SystemExit
""",
    "an exit function that leaves": """
import atexit, os
atexit.register(os._exit, 0)
def solve(x): return 'wrong'
""",
    "leaving from a thread": """
import os, threading
def solve(x):
    threading.Thread(target=os._exit, args=(0,)).start()
    import time
    time.sleep(1)
""",
    "another program in its place": """
import os
def solve(x):
    for path in ('/bin/true', '/usr/bin/true'):
        try: os.execv(path, ['true'])
        except OSError: pass
    return 'wrong'
""",
    "Python again, which ends well": """
import os, sys
def solve(x):
    try: os.execv(sys.executable, ['python', '-c', '0'])
    except (OSError, TypeError): return 'wrong'
""",
    "a signal to itself": """
import os, signal
def solve(x): os.kill(os.getpid(), signal.SIGKILL)
""",
    "an abort": """
import os
def solve(x): os.abort()
""",
    "a fault in memory": """
import ctypes
def solve(x): ctypes.string_at(0)
""",
    "a keyboard interrupt": """
def solve(x): raise KeyboardInterrupt
""",
    "a base exception of its own": """
class Out(BaseException): pass
def solve(x): raise Out('passed')
""",
    "an exception whose text raises": """
class Out(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
def solve(x): raise Out()
""",
    "a child that answers while the parent leaves": """
import os
def solve(x):
    if os.fork(): os._exit(0)
    return 'wrong'
""",
}
EXITS = [Attack(name=name, program=program, statuses=WRONG_OR_RAISED) for name, program in _EXITS.items()]
# An exit status is the program's to choose: none of them may say that the sandbox is at fault, or that it passed.
EXITS += [
    Attack(
        name=f"exit status {status}",
        program=f"import os\ndef solve(x): os._exit({status})",
        # 121 is what Python's own MemoryError ends with inside; a program may raise that as well
        statuses=RAISED | MEMORY if status == 121 else RAISED,
        kinds=ALL,
    )
    for status in (1, 77, 119, 120, 121, 122, 123, 124, 125, 126, 127, 137, 255)
]
ATTACKS = FORGERIES
