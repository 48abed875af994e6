"""The trusted process of one assert test: runs the test; the program's names are stubs that ask the sandbox.

Run as `python -I -S assert_process.py`. Over standard input and output it speaks frames (four bytes of length,
then `codec` text) with `asserts.py`: it gets `(source, test code, names, limits, NumPy's folder or None)`, asks with
`("ask", action, target, name, args, kwargs)` and ends with `("passed",)`, `("failed", type, message)` or
`("refused", message)`. No value that the program made has methods of the program here: objects are numbers
of objects that stay in the sandbox (`remote_objects.py`), and no operator is left to them.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import resource
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

T = TypeVar("T")

#: Modules that a test may use without importing them, as it could in the program's own file.
MODULES = frozenset(
    ("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "hashlib", "heapq")
) | frozenset(("itertools", "json", "math", "operator", "random", "re", "statistics", "string", "time", "typing"))
#: What NumPy asks an object for to read memory at an address, or by a shape, that the object states: never the program.
_MEMORY = ("__array", "__dlpack")
#: Longest iterator that a test may give to the program; it is read to its end first.
MOST_ITEMS = 100_000


class Refused(BaseException):
    """The test asks for what cannot be evaluated outside; says nothing about the program."""


def _beside(name: str) -> ModuleType:
    """Return a module of this folder, whose package is not imported."""
    loader = importlib.machinery.SourceFileLoader(name, str(Path(__file__).with_name(f"{name}.py")))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Channel:
    """Frames over two pipes."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self.codec = _beside("codec")
        self._source, self._sink = source, sink

    def receive(self) -> Any:
        """Return the next message."""
        size = int.from_bytes(self._source.read(4), "big")
        return self.codec.decode(self._source.read(size), max_bytes=size)

    def send(self, message: tuple[Any, ...]) -> None:
        """Write one message; a `CodecError` (a ValueError) says that it holds what cannot enter the sandbox."""
        data = self.codec.encode(message)
        self._sink.write(len(data).to_bytes(4, "big") + data)
        self._sink.flush()


class Client:
    """Turns what the test does with the program's names into questions to the sandbox."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.exceptions: dict[str, type[Exception]] = {}
        self.requests = 0
        self.compared = False  # objects of the program were compared by identity

    def ask(
        self,
        action: str,
        target: tuple[Any, ...],
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the value of one action, or raise what the program raised."""
        given: dict[Any, Any] = {**dict(enumerate(args)), **(kwargs or {})}
        self.requests += 1
        packed = {at: self._wrap(value) for at, value in (kwargs or {}).items()}
        self.channel.send(("ask", action, target, name, [self._wrap(value) for value in args], packed))
        answer = self.channel.receive()
        try:
            if answer[0] == "value":
                for at, changed in answer[2]:
                    _replace(given[at], self._unwrap(changed))
                return self._unwrap(answer[1])
            # elsewhere it would end a `map` of the test early
            stopped = answer[0] == "stop" and action == "next"
            kinds, message = (["StopIteration"], "") if answer[0] == "stop" else (answer[1], str(answer[2]))
        except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
            raise RuntimeError(f"the program answered with something malformed: {error!r}") from None
        raise StopIteration if stopped else self._exception(kinds)(message)

    def _exception(self, kinds: Any) -> type[Exception]:
        for name in kinds if isinstance(kinds, list) else []:
            if not isinstance(name, str):
                continue
            if name in self.exceptions:
                return self.exceptions[name]
            known = getattr(builtins, name, None)
            if isinstance(known, type) and issubclass(known, Exception) and _plainly_made(known):
                return known
        return RuntimeError

    def _wrap(self, value: Any) -> tuple[Any, ...]:  # noqa: PLR0911 - one case for each kind
        if isinstance(value, (Handle, Name)):
            return cast(tuple[Any, ...], object.__getattribute__(value, "_target"))
        if type(value) in {list, tuple, set}:
            parts = [self._wrap(item) for item in value]
            if all(part[0] == "v" for part in parts):
                return ("v", value)
            return (type(value).__name__[0], parts)
        if type(value) is dict:
            pairs = [[self._wrap(key), self._wrap(item)] for key, item in value.items()]
            if all(part[0] == "v" for pair in pairs for part in pair):
                return ("v", value)
            return ("d", pairs)
        if type(value) is range:
            return ("r", value.start, value.stop, value.step)
        if isinstance(value, Iterator):
            items = list(itertools.islice(value, MOST_ITEMS + 1))
            if len(items) > MOST_ITEMS:
                raise ValueError(f"an iterator of more than {MOST_ITEMS} elements cannot be given to the program")
            return ("i", [self._wrap(item) for item in items])
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and type(value.item()).__module__ == "builtins":
            return ("v", value.item())
        if callable(value):
            raise Refused(f"the test gives the program a function of its own, {value!r}: it cannot enter the sandbox")
        if type(value).__module__ not in {"builtins", "collections", "decimal", "fractions"}:
            raise Refused(f"the test gives the program {value!r}: a {type(value).__name__} cannot enter the sandbox")
        return ("v", value)

    def _unwrap(self, wrapped: Any) -> Any:
        tag, content = wrapped[0], wrapped[1]
        if tag == "v":
            return content
        if tag == "h":
            return Handle(self, ("h", _exactly(int, content)), str(wrapped[2]))
        if tag == "d":
            return {self._unwrap(key): self._unwrap(item) for key, item in content}
        return {"l": list, "t": tuple, "s": set}[tag](self._unwrap(item) for item in content)


class Handle:
    """An object that lives in the sandbox.

    Attributes, methods, items, length, text and iteration are requested from there. `==` is identity, truth is
    `True`, and `in`, `<`, `+` and their like are errors, whatever the object's class says: a program does not
    decide its own result, and an expected value that stands beside an operator does not reach it.
    """

    __slots__ = ("_class", "_client", "_target")
    __contains__ = None

    def __init__(self, client: Client, target: tuple[Any, ...], class_name: str) -> None:
        for name, value in (("_client", client), ("_target", target), ("_class", class_name)):
            object.__setattr__(self, name, value)

    def _ask(self, action: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        client: Client = object.__getattribute__(self, "_client")
        return client.ask(action, object.__getattribute__(self, "_target"), name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        _require_no_memory(name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in the sandbox."""
        return self._ask("call", None, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("call", "__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("call", "__setitem__", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("call", "__delitem__", key)

    def __len__(self) -> int:
        return _exactly(int, self._ask("len"))

    def __str__(self) -> str:
        return _exactly(str, self._ask("str"))

    def __repr__(self) -> str:
        return _exactly(str, self._ask("repr"))

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __enter__(self) -> Any:
        return self._ask("call", "__enter__")

    def __exit__(self, *_: object) -> None:
        self._ask("call", "__exit__", None, None, None)

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_target"))

    def __eq__(self, other: object) -> bool:
        if other is None or not isinstance(other, Handle):
            return False
        self._client.compared = True
        return bool(other._target == self._target)


class Name:
    """A function or class of the program."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._target = client, ("n", name)
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in the sandbox."""
        return self._client.ask("call", self._target, None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        _require_no_memory(name)
        return self._client.ask("get", self._target, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Handle) and instance._class == self.__name__


def _require_no_memory(name: str) -> None:
    if name.startswith(_MEMORY):
        raise AttributeError(f"{name} of an object of the program is not asked for")


def _exactly(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"the program gave a {type(value).__name__} where only a {kind.__name__} is allowed")
    return value


def _plainly_made(kind: type[Exception]) -> bool:
    """Say whether `kind("message")` works and may be raised here."""
    return not issubclass(kind, (StopIteration, StopAsyncIteration, UnicodeError, ImportError, BaseExceptionGroup))


def _replace(value: Any, new: Any) -> None:
    """Give a mutable argument the content that the program left in it."""
    if type(value) is not type(new) or type(value) not in {list, dict, set, deque}:
        return
    value.clear()
    if isinstance(value, (list, deque)):
        value.extend(new)
    else:
        value.update(new)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run in the module's own scope, also those inside `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def stubs(source: str, used: set[str], names: Sequence[str], client: Client) -> dict[str, Any]:
    """Return stand-ins for the names that a program defines.

    Builtins and `MODULES` keep their meaning whatever the program calls so, unless `names` says otherwise:
    a program that defines `len` does not change how a test counts.
    """
    found: dict[str, Any] = {}
    assigned: set[str] = set()
    imported: set[str] = set()
    for statement in _statements(ast.parse(source).body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[statement.name] = Name(client, statement.name)
        elif isinstance(statement, ast.ClassDef):
            found[statement.name] = _class_stub(statement, client)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            parts = [part for target in targets for part in ast.walk(target)]
            assigned |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            imported |= {alias.asname or alias.name for alias in statement.names}
    reserved = (set(dir(builtins)) | MODULES) - set(names)
    for name in ((assigned | imported) & used) - found.keys() - reserved:
        requests = client.requests
        try:
            found[name] = client.ask("get", ("n", name))
        except KeyError:  # never assigned when the program ran
            client.requests = requests
        if name not in assigned:
            client.requests = requests  # an import is not yet the program's own work
    return {name: stub for name, stub in found.items() if name not in reserved and not name.startswith("__")}


def _class_stub(statement: ast.ClassDef, client: Client) -> Any:
    """Return a stub, or for an exception a class of the same name, so that a test can catch it."""
    for base in statement.bases:
        if isinstance(base, ast.Name):
            known = client.exceptions.get(base.id) or getattr(builtins, base.id, None)
            if isinstance(known, type) and issubclass(known, Exception) and _plainly_made(known):
                client.exceptions[statement.name] = type(statement.name, (known,), {})
                return client.exceptions[statement.name]
    return Name(client, statement.name)


def run_test(channel: Channel) -> tuple[Any, ...]:
    """Run the test; return the message that ends the conversation."""
    source, code, names, limits, numpy = channel.receive()
    for limit, value in limits.items():
        resource.setrlimit(getattr(resource, limit), (value, value))
    try:
        tree = ast.parse(code, "<test>")
        test = compile(tree, "<test>", "exec")
    except (SyntaxError, MemoryError, RecursionError) as error:
        what = f"is no Python: {error}" if isinstance(error, SyntaxError) else "is too large to be read"
        return ("refused", f"the test {what}")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    client = Client(channel)
    if numpy is not None:
        _beside("numpy_only").load_numpy(numpy, strict=True)
    try:
        scope = stubs(source, used, names, client)
        scope |= {name: importlib.import_module(name) for name in (MODULES & used) - set(names)}
        scope["__name__"] = "test"
        exec(test, scope)
    except Refused as error:
        return ("refused", str(error))
    except ImportError as error:  # never the program's: `_plainly_made` keeps those away
        return ("refused", f"the test needs a module that it cannot import: {error}")
    except BaseException as error:  # noqa: BLE001 - also SystemExit: only the end of the test is a pass
        hint = " (objects of the program are compared by identity)" if client.compared else ""
        return ("failed", type(error).__name__, _place(error) + _text(error) + hint)
    if client.requests == 0:
        return ("refused", "the test ended without using the program: is its check ever called?")
    return ("passed",)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException as other:  # noqa: BLE001 - a test may attach an object whose text comes from the sandbox
        return f"(its text cannot be had: {type(other).__name__})"


def _place(error: BaseException) -> str:
    """Return the line of the test at which it failed."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<test>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f"line {line} of the test: "


def main() -> NoReturn:
    """Keep the pipes for frames alone, run one test and leave."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    channel = Channel(cast(BinaryIO, source), cast(BinaryIO, sink))
    channel.send(run_test(channel))
    os._exit(0)


if __name__ == "__main__":
    sys.setrecursionlimit(3000)
    main()
