"""SGLang's engine of ours on a stand-in for SGLang, whose own packages need NVIDIA GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).resolve().parent / "sglang_stand_in"


@contextmanager
def stand_in() -> Iterator[None]:
    """Let `import sglang` find the stand-in."""
    sys.path.insert(0, str(STAND_IN))
    try:
        yield
    finally:
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]


def tokens_of(engine: Any) -> dict[str, int]:
    """Return how many tokens each unfinished request of an engine has in the stand-in."""
    scheduler = engine._manager.scheduler
    counts = {each.asked.rid: len(each.ids) for each in (*scheduler.waiting, *scheduler.running)}
    return {name: counts.get(engine._sglang_ids.get(name, ""), 0) for name in engine._tasks}
