# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="misc, type-arg, operator"
"""Lets a test outside reach a program's functions, classes and objects inside the sandbox.

The text of this file is appended to the program, so it runs inside and names nothing that a program is likely
to name. A test's process knows objects by number; the objects themselves stay here. The program can change all
of this as it likes: what it sends is compared outside, and it learns arguments of calls, never what is expected.

Values cross in a wrapping, because a container may hold objects: `("v", plain)`, `("h", number, class)` for an
object that stays, `("n", name)` for a name of the program, `("l" | "t" | "s", […])` and `("d", [[key, value], …])`
for containers of such. Only into the sandbox: `("i", […])`, an iterator, and `("r", start, stop, step)`, a range.
"""

import copy as _remote_copy
from collections import Counter as _RemoteCounter
from collections import OrderedDict as _RemoteOrderedDict
from collections import defaultdict as _remote_defaultdict
from collections import deque as _remote_deque
from decimal import Decimal as _RemoteDecimal
from fractions import Fraction as _RemoteFraction


class _Remote:
    """The objects that a test knows by number, and the wrapping of values."""

    objects: list = []  # noqa: RUF012 - one for the whole process is meant
    scalars = (type(None), bool, int, float, str, bytes, complex, _RemoteDecimal, _RemoteFraction)
    sequences = (list, tuple, set, frozenset, _remote_deque)
    dicts = (dict, _RemoteOrderedDict, _remote_defaultdict, _RemoteCounter)
    makers = {"iter": iter, "next": next, "str": str, "repr": repr, "len": len}  # noqa: RUF012

    @classmethod
    def is_plain(cls, value, depth=50):
        """Say whether the codec takes `value` as it is."""
        kind = type(value)
        if kind in cls.scalars:
            return True
        if depth and kind in cls.sequences:
            return all(cls.is_plain(item, depth - 1) for item in value)
        if depth and kind in cls.dicts:
            return all(cls.is_plain(part, depth - 1) for pair in value.items() for part in pair)
        return False

    @classmethod
    def wrap(cls, value, depth=20):
        """Wrap a value that leaves."""
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            plain = value.tolist()
            if type(plain) is kind:  # long doubles, which no plain number holds exactly
                plain = complex(value) if kind.__name__.startswith("c") else float(value)
            return cls.wrap(plain, depth)
        if cls.is_plain(value):
            return ("v", value)
        if depth and kind in (list, tuple, set):
            return (kind.__name__[0], [cls.wrap(item, depth - 1) for item in value])
        if depth and kind is dict:
            return ("d", [[cls.wrap(part, depth - 1) for part in pair] for pair in value.items()])
        cls.objects.append(value)
        return ("h", len(cls.objects) - 1, str(kind.__name__))

    @staticmethod
    def differs(now, then):
        """Say whether an argument may have changed."""
        try:
            return bool(now != then)
        except Exception:  # noqa: BLE001 - arrays say it of each number, objects of the program what they like
            return True

    @classmethod
    def unwrap(cls, wrapped):
        """Return the value of what came in."""
        tag, content = wrapped[0], wrapped[1]
        lookup = {"v": lambda: content, "h": lambda: cls.objects[content], "n": lambda: globals()[content]}
        if tag in lookup:
            return lookup[tag]()
        if tag == "r":
            return range(*wrapped[1:])
        if tag == "d":
            return {cls.unwrap(key): cls.unwrap(item) for key, item in content}
        return {"l": list, "t": tuple, "s": set, "i": iter}[tag]([cls.unwrap(item) for item in content])

    @classmethod
    def call(cls, function, args, kwargs):
        """Call, and return the result and those arguments that the call changed."""
        positional = [cls.unwrap(item) for item in args]
        named = {name: cls.unwrap(item) for name, item in kwargs.items()}
        given = [*enumerate(positional), *named.items()]
        mutable = [(at, value) for at, value in given if type(value) in (list, dict, set, _remote_deque)]
        before = [_remote_copy.deepcopy(value) for _, value in mutable]
        result = function(*positional, **named)
        pairs = zip(mutable, before, strict=True)
        changed = [[at, cls.wrap(now)] for (at, now), then in pairs if cls.differs(now, then)]
        return ("value", cls.wrap(result), changed)

    @classmethod
    def act(cls, action, target, name, args, kwargs):
        """Do one thing that the test asks for."""
        thing = cls.unwrap(target)
        if action == "call":
            return cls.call(thing if name is None else getattr(thing, name), args, kwargs)
        if action == "get":
            return ("value", cls.wrap(thing if name is None else getattr(thing, name)), [])
        if action == "set":
            setattr(thing, name, cls.unwrap(args[0]))
            return ("value", ("v", None), [])
        return ("value", cls.wrap(cls.makers[action](thing)), [])


def _remote_ask(action, target, name, args, kwargs):
    """Return `("value", result, changed arguments)`, `("raised", names of classes, message)` or `("stop",)`."""
    try:
        return _Remote.act(action, target, name, args, kwargs)
    except StopIteration:
        return ("stop",)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the program may raise anything; the test outside sees it
        return ("raised", [kind.__name__ for kind in type(error).__mro__], str(error)[:1000])
