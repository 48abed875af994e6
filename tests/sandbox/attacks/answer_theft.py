"""Programs that look for the expected answer: `answer-` and 32 hexadecimal digits, somewhere."""

from __future__ import annotations

from attacks.case import WRONG, WRONG_OR_RAISED, Attack

_FOUND = """
import os, re, sys

def found(data):
    if isinstance(data, (list, tuple, dict)):  # one part with a text that raises should not hide the others
        parts = [*data, *data.values()] if isinstance(data, dict) else [*data]
        try: data = repr(data)
        except Exception: data = [part for part in parts if isinstance(part, (str, bytes))]
    data = data if isinstance(data, (bytes, bytearray)) else repr(data).encode("utf-8", "replace")
    match = re.search(rb"answer-[0-9a-f]{32}", data)
    return match and match[0].decode()

def solve(x):
    try:
        return steal() or "nothing"
    except Exception as error:
        return "nothing: " + repr(error)[:200]

"""

_BODIES = {
    "frames": """
def steal():
    frame = sys._getframe()
    while frame:
        hit = found([*frame.f_locals.items()]) or found([*frame.f_globals.items()])
        if hit: return hit
        frame = frame.f_back
""",
    "frames of a traceback": """
def steal():
    try: raise ValueError
    except ValueError as error: trace = error.__traceback__
    while trace:
        frame = trace.tb_frame
        while frame:
            hit = found(dict(frame.f_locals))
            if hit: return hit
            frame = frame.f_back
        trace = trace.tb_next
""",
    "frames of all threads": """
def steal():
    for frame in sys._current_frames().values():
        while frame:
            hit = found(dict(frame.f_locals)) or found(frame.f_code.co_consts)
            if hit: return hit
            frame = frame.f_back
""",
    "constants of code objects": """
import inspect
def steal():
    for entry in inspect.stack():
        code = [entry.frame.f_code]
        while code:
            one = code.pop()
            hit = found(one.co_consts)
            if hit: return hit
            code += [c for c in one.co_consts if hasattr(c, "co_consts")]
""",
    "objects of the garbage collector": """
import gc
def steal():
    for value in gc.get_objects():
        if type(value) in (list, tuple, dict, set):
            try: hit = found(value)
            except Exception: continue
            if hit: return hit
""",
    "referrers": """
import gc
def steal():
    seen, queue = set(), [solve, gc]
    while queue and len(seen) < 20000:
        value = queue.pop()
        if id(value) in seen: continue
        seen.add(id(value))
        if isinstance(value, str) and found(value): return found(value)
        if not isinstance(value, (str, int)): queue += gc.get_referrers(value)[:50] + gc.get_referents(value)[:50]
""",
    "modules": """
def steal():
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if isinstance(value, (str, bytes, dict, list, tuple)):
                hit = found(value)
                if hit: return hit
""",
    "source lines in the line cache": """
import linecache, tokenize
def steal():
    return found(linecache.cache) or found(getattr(sys.modules.get("__main__"), "__dict__", {}))
""",
    "the file system": """
def steal():
    for top in (".", "/tmp", "/box", "/home", "/root", "/etc", "/var", "/run", "/mnt", "/srv", "/opt", "/dev/shm"):
        for folder, _, names in os.walk(top):
            for name in names[:300]:
                try:
                    with open(os.path.join(folder, name), "rb") as file: hit = found(file.read(1 << 16))
                except OSError: continue
                if hit: return hit
""",
    "the environment": """
def steal():
    texts = [repr(dict(os.environ)).encode()]
    for pid in ["self", *filter(str.isdigit, os.listdir("/proc"))]:
        try: texts.append(open(f"/proc/{pid}/environ", "rb").read())
        except OSError: pass
    return found(b" ".join(texts))
""",
    "arguments of processes": """
def steal():
    texts = [repr((sys.argv, sys.orig_argv)).encode()]
    for pid in ["self", *filter(str.isdigit, os.listdir("/proc"))]:
        try: texts.append(open(f"/proc/{pid}/cmdline", "rb").read())
        except OSError: pass
    return found(b" ".join(texts))
""",
    "every descriptor": """
def steal():
    for number in range(256):
        try:
            os.set_blocking(number, False)
            data = os.read(number, 1 << 20)
        except OSError: continue
        finally:
            try: os.set_blocking(number, True)
            except OSError: pass
        if found(data): return found(data)
        try: hit = found(os.pread(number, 1 << 20, 0))
        except OSError: continue
        if hit: return hit
""",
    "descriptors reopened through /proc": """
def steal():
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                with open(f"/proc/self/fd/{name}", "rb", opener=lambda p, f: os.open(p, f | os.O_NONBLOCK)) as file:
                    hit = found(file.read(1 << 20) or b"")
                    if hit: return hit
        except OSError: continue
""",
    "its own memory, where a fork would leave it": """
def steal():
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            low, high = (int(end, 16) for end in span.split("-"))
            if "r" in rights and high - low < 64 << 20:
                try:
                    memory.seek(low)
                    data = memory.read(high - low)
                except (OSError, ValueError, OverflowError): continue
                for match in re.finditer(rb"answer-[0-9a-f]{32}", data):
                    return match[0].decode()
""",
    "memory of other processes": """
def steal():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid(): continue
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                for line in maps:
                    low, high = (int(end, 16) for end in line.split()[0].split("-"))
                    memory.seek(low)
                    hit = found(memory.read(min(high - low, 16 << 20)))
                    if hit: return hit
        except (OSError, ValueError, OverflowError): continue
""",
    "memory of its parent by process_vm_readv": """
import ctypes
def steal():
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(1 << 20)
    class Span(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    for low in (0x400000, 0x555555554000, id(object()) & ~0xFFFFF):
        ours, theirs = Span(ctypes.addressof(buffer), 1 << 20), Span(low, 1 << 20)
        libc.process_vm_readv(os.getppid(), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if found(buffer.raw): return found(buffer.raw)
""",
    "what comes after the input": """
def steal():
    return found(sys.stdin.read() if not sys.stdin.closed else "")
""",
    "values seen by a trace function": """
seen = []
def watch(frame, event, argument):
    seen.extend(value for value in (*frame.f_locals.values(), argument) if isinstance(value, (str, bytes)))
    return watch
sys.settrace(watch)
def steal():
    sys.settrace(None)
    hit = found(seen)
    sys.settrace(watch)
    return hit
""",
    "values seen by an audit hook": """
seen = []
sys.addaudithook(lambda event, arguments: seen.append(arguments) if len(seen) < 10000 else None)
def steal():
    return found(seen)
""",
    "values seen by patched readers": """
import builtins, json
seen = []
def listening(function):
    def wrapper(*args, **kwargs):
        value = function(*args, **kwargs)
        seen.append((args, kwargs, value))
        return value
    return wrapper
json.loads, os.read, builtins.exec, builtins.compile = map(listening, (json.loads, os.read, exec, compile))
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").endswith("codec"): module.decode = listening(module.decode)
def steal():
    return found(seen)
""",
    "a comparison that shows its other side": """
kept = []
class Nosy(str):
    def __eq__(self, other): kept.append(other); return True
    def __ne__(self, other): kept.append(other); return False
    __hash__ = str.__hash__
def steal():
    return found(kept) or Nosy("?")
""",
    "an object whose methods get the answer": """
kept = []
class Nosy:
    def __eq__(self, other): kept.append(other); return True
    def __getattr__(self, name): kept.append(name); return lambda *args: kept.append(args) or True
    def __contains__(self, other): kept.append(other); return True
    def __sub__(self, other): kept.append(other); return 0
    __rsub__ = __lt__ = __gt__ = __sub__
def steal():
    return found(kept) or Nosy()
""",
}

ATTACKS = [Attack(name=name, program=_FOUND + body, statuses=WRONG_OR_RAISED) for name, body in _BODIES.items()]
ATTACKS += [
    Attack(
        name="a class where a function is asked for, with operators of its own",
        program="kept = []\nclass solve:\n    def __init__(self, x): pass\n"
        "    def __eq__(self, other): kept.append(other); return True\n    __lt__ = __contains__ = __sub__ = __eq__\n",
        statuses=WRONG_OR_RAISED,
    ),
    Attack(
        name="the answer asked of the one who calls",
        program="import sys\ndef solve(x):\n    return sys.stdin.readline().strip() or 'nothing'",
        statuses=WRONG,
        kinds=("call", "assert"),
    ),
]
