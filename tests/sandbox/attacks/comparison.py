"""Programs that give what is not the answer and hope that the comparison takes it."""

from __future__ import annotations

from attacks.case import OUTPUT, RAISED, TIMEOUT, WRONG, WRONG_OR_RAISED, Attack

#: Tests whose expected value is known, so that a comparison could be talked into a match.
CALLS = ("call", "assert")


def _value(name: str, program: str, expected: object = "right", **options: object) -> Attack:
    fields: dict[str, object] = {"statuses": WRONG_OR_RAISED, "kinds": CALLS} | options
    return Attack(name=name, program=program, expected=expected, **fields)  # type: ignore[arg-type]


def _output(name: str, program: str, expected: str = "right", **options: object) -> Attack:
    fields: dict[str, object] = {"statuses": WRONG, "kinds": ("stdio",), "main": False} | options
    return Attack(name=name, program=program, expected=expected, **fields)  # type: ignore[arg-type]


_ALWAYS = """
class Always{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 0
    def __instancecheck__(self, other): return True
"""

ATTACKS = [
    _value("an object equal to everything", _ALWAYS.format(base="") + "def solve(x): return Always()"),
    _value("a string equal to everything", _ALWAYS.format(base="(str)") + "def solve(x): return Always('wrong')"),
    _value("an integer equal to everything", _ALWAYS.format(base="(int)") + "def solve(x): return Always(3)", 4),
    _value("a float equal to everything", _ALWAYS.format(base="(float)") + "def solve(x): return Always(3)", 4.0),
    _value("a list equal to everything", _ALWAYS.format(base="(list)") + "def solve(x): return Always()", [1]),
    _value("a dictionary equal to everything", _ALWAYS.format(base="(dict)") + "def solve(x): return Always()", {1: 2}),
    _value("objects equal to everything in a list", _ALWAYS.format(base="") + "def solve(x): return [Always()]", [1]),
    _value(
        "an object that says it is a string",
        _ALWAYS.format(base="") + "    __class__ = property(lambda self: str)\ndef solve(x): return Always()",
    ),
    _value(
        "a class equal to everything",
        "class Meta(type):\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 0\nclass A(metaclass=Meta): pass\n"
        "def solve(x): return A",
    ),
    # in an assert test Python itself says that True == 1
    _value("a truth value for a number", "def solve(x): return True", 1, kinds=("call",)),
    _value("a number for a truth value", "def solve(x): return 1", True, kinds=("call",)),
    _value("a string for a number", "def solve(x): return '1'", 1),
    _value("not a number", "def solve(x): return float('nan')", 1.5),
    _value("not implemented", "def solve(x): return NotImplemented", 1),
    _value("an exception that is returned", "def solve(x): return AssertionError('right')"),
    _value(
        "patched builtins",
        "import builtins\nfor name in ('len', 'isinstance', 'type', 'all', 'any', 'sorted', 'repr', 'str', 'zip'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\ndef solve(x): return 'wrong'",
        statuses=WRONG_OR_RAISED | TIMEOUT,  # what serves calls inside uses those builtins too
    ),
    _value(
        "builtins named again in the program",
        "def all(*a): return True\ndef len(*a): return 1\ndef isinstance(*a): return True\n"
        "class answer:\n    __eq__ = lambda *a: True\ndef solve(x): return 'wrong'",
    ),
    _value(
        "patched codec",
        "import sys\nfor module in list(sys.modules.values()):\n"
        "    if getattr(module, '__name__', '').endswith('codec'):\n"
        "        module.encode = lambda value, **k: b'{\"right\": true}'\n"
        "def solve(x): return object()",
    ),
    _value(
        "patched json",
        "import json\njson.dumps = lambda *a, **k: 'NaN'\njson.loads = lambda *a, **k: True\n"
        "def solve(x): return 'wrong'",
    ),
    _value(
        "patched string comparison in memory",
        "import ctypes\ntry:\n    slots = ctypes.cast(id(str), ctypes.POINTER(ctypes.c_void_p))\n"
        "    for at in range(24, 30): slots[at]\nexcept Exception: pass\ndef solve(x): return 'wrong'",
    ),
    _value(
        "an object whose pickle runs a command",
        "import os\nclass Pickled:\n    def __reduce__(self): return (os.system, ('touch /tmp/breach',))\n"
        "def solve(x): return Pickled()",
    ),
    _value("a module", "import sys\ndef solve(x): return sys"),
    _value("a function equal to everything", "def solve(x): return solve"),
    _value("a generator", "def solve(x): yield 'right'"),
    _value(
        "keys that collide", "def solve(x): return {k * ((1 << 61) - 1) for k in range(1000)}", statuses=WRONG_OR_RAISED
    ),
    _value(
        "a very deep list",
        "def solve(x):\n    value = []\n    for _ in range(100000): value = [value]\n    return value",
    ),
    _value(
        "a list that contains itself", "def solve(x):\n    value = ['right']\n    value.append(value)\n    return value"
    ),
    _value("a very long integer", "def solve(x): return 1 << (1 << 22)", 1),
    _value("an exception that ends a loop early", "def solve(x): raise StopIteration", statuses=RAISED),
    _value("an assertion of its own", "def solve(x): raise AssertionError('passed')"),
    _output("both answers", "print('wrong')\nprint('right')"),
    _output("an answer overwritten on a terminal", "print('wrong', end='\\r')\nprint('right')"),
    _output("an answer with backspaces", "print('wrong' + chr(8) * 5 + 'right')"),
    _output("an answer behind an escape sequence", "print(chr(27) + '[2J' + 'right')"),
    _output("an answer with letters that look alike", "print('r\\u0456ght')"),
    _output("an answer with null characters", "print('ri' + chr(0) + 'ght')"),
    _output("an answer with invisible characters", "print('ri\\u200bght')"),
    _output("an answer in full-width digits", "print('\\uff11\\uff12')", "12"),
    _output("the answer on standard error", "import sys\nprint('right', file=sys.stderr)"),
    _output("every answer there is", "for n in range(10 ** 7): print(n)", "12345", statuses=OUTPUT),
]
