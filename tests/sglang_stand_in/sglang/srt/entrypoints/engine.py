"""The engine and its tokenizer manager."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang.recorded import RECORD, with_signature
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class Engine:
    #: Processes that a test gives it.
    children: ClassVar[list[int]] = []
    #: What it was made with last.
    arguments: ClassVar[dict[str, Any]] = {}

    @with_signature("Engine.__init__")
    def __init__(self, **kwargs: Any) -> None:
        unknown = set(kwargs) - set(RECORD["server_args"])
        if unknown:
            raise TypeError(f"ServerArgs has no {sorted(unknown)}")
        type(self).arguments = kwargs
        self.tokenizer_manager = TokenizerManager(kwargs)

    @with_signature("Engine.get_all_child_pids")
    def get_all_child_pids(self) -> list[int]:
        return list(self.children)

    @with_signature("Engine.shutdown")
    def shutdown(self) -> None:
        self.tokenizer_manager.end()
