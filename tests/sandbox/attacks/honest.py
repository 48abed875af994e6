"""Honest programs that use what a sandbox may not take away; every one has to pass."""

from __future__ import annotations

from attacks.case import ALL, PASSED, Attack

_PROGRAMS = {
    "arithmetic": (
        42,
        """
def solve(x): return 42 if x else 0
""",
    ),
    "a class": (
        42,
        """
class Counter:
    def __init__(self): self.n = 40
    def up(self): self.n += 2; return self.n
def solve(x): return Counter().up()
""",
    ),
    "recursion of some depth": (
        5000,
        """
import sys
sys.setrecursionlimit(20000)
def depth(n): return n and 1 + depth(n - 1)
def solve(x): return depth(5000)
""",
    ),
    "nested containers": (
        [(1, "a"), {"k": [None, True]}],
        """
def solve(x): return [(1, 'a'), {'k': [None, True]}]
""",
    ),
    "a long integer": (
        3**500,
        """
def solve(x): return 3 ** 500
""",
    ),
    "floats": (
        1.4142135623730951,
        """
import math
def solve(x): return math.sqrt(2.0)
""",
    ),
    "unicode": (
        "naïve ☃ 你好 😀",
        """
def solve(x): return 'naïve ☃ 你好 😀'
""",
    ),
    "four threads": (
        6,
        """
import threading
def solve(x):
    total = []
    threads = [threading.Thread(target=total.append, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return sum(total)
""",
    ),
    "a pool of threads": (
        6,
        """
from concurrent.futures import ThreadPoolExecutor
def solve(x):
    with ThreadPoolExecutor(3) as pool: return sum(pool.map(abs, [-1, -2, 3]))
""",
    ),
    "a child process": (
        7,
        """
import os
def solve(x):
    pid = os.fork()
    if pid == 0: os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""",
    ),
    "a temporary file": (
        "held",
        """
import tempfile
def solve(x):
    with tempfile.NamedTemporaryFile('w+') as file:
        file.write('held')
        file.seek(0)
        return file.read()
""",
    ),
    "exceptions caught": (
        "integer division or modulo by zero",
        """
def solve(x):
    try: return 1 // 0
    except ZeroDivisionError as error: return str(error)
""",
    ),
    "sixty megabytes": (
        60,
        """
def solve(x): return len(bytearray(60 << 20)) >> 20
""",
    ),
    "half a second of work": (
        90,
        """
def solve(x): return sum(n * n for n in range(1_000_000)) % 97
""",
    ),
    "modules of the library": (
        [[1], "bb", 1, 1, 4, "2024-02-29", 2, 5],
        """
import re, json, heapq, bisect, random, itertools, functools, dataclasses, datetime, statistics
@dataclasses.dataclass
class P: x: int
def solve(x):
    random.seed(1)
    heap = [3, 1, 2]
    heapq.heapify(heap)
    return [json.loads('[1]'), re.sub('a', 'b', 'aa'), heap[0], bisect.bisect([1, 2], 1), P(4).x,
            datetime.date(2024, 2, 29).isoformat(), statistics.mean([1, 3]), functools.reduce(max, [1, 5])]
""",
    ),
    "a cache": (
        2880067194370816120,
        """
from functools import lru_cache
@lru_cache(None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def solve(x): return fib(90)
""",
    ),
    "decimals and fractions": (
        "4/30.3",
        """
from fractions import Fraction
from decimal import Decimal
def solve(x): return str(Fraction(1, 3) + 1) + str(Decimal('0.1') * 3)
""",
    ),
    "much output before the answer": (
        1,
        """
import sys
def solve(x):
    sys.stderr.write('x' * 20000)
    return 1
""",
    ),
    "an event loop": (
        5,
        """
import asyncio
async def main():
    await asyncio.sleep(0)
    return 5
def solve(x): return asyncio.run(main())
""",
    ),
    "a name of a builtin, inside": (
        [1, 3],
        """
def solve(x):
    list = [3, 1]
    list.sort()
    return list
""",
    ),
}

ATTACKS = [
    Attack(name=name, program=program, expected=expected, statuses=PASSED, kinds=ALL)
    for name, (expected, program) in _PROGRAMS.items()
]
ATTACKS += [
    Attack(
        name="standard input read in every way",
        program="import sys\nfirst = input()\nrest = sys.stdin.read().split()\nprint(int(first) + len(rest))",
        expected=1,
        statuses=PASSED,
        kinds=("stdio",),
        main=False,
    ),
    Attack(
        name="main under its guard",
        program="import sys\ndef main():\n    print(*sys.stdin.readline().split())\n"
        "if __name__ == '__main__':\n    main()\n    sys.exit(0)",
        expected=1,
        statuses=PASSED,
        kinds=("stdio",),
        main=False,
    ),
]
