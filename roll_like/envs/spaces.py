"""Spaces of text that take whatever a language model says."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from gymnasium.spaces import Text

#: Characters of random text. Answers are not limited to them.
PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n"
#: Length of random text, in characters.
SAMPLE_LENGTH = 32


class FreeText(Text):
    """Any string of up to `max_length` characters, in any script; `sample` gives short printable ASCII.

    `gymnasium.spaces.Text` holds strings over a fixed alphabet. A policy's answers, and many
    environments' texts, know no such limit.
    """

    def __init__(self, max_length: int = 1_000_000) -> None:
        super().__init__(max_length, min_length=0, charset=PRINTABLE)

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a string that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return random text of at most `SAMPLE_LENGTH` characters, or what a mask asks for."""
        return self._drawn() if mask is None and probability is None else super().sample(mask, probability)

    def _drawn(self) -> str:
        length = int(self.np_random.integers(0, min(SAMPLE_LENGTH, self.max_length) + 1))
        return "".join(self.np_random.choice(self.character_list, size=length))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_length})"


class Commands(FreeText):
    """Any string; `sample` gives one of the commands, so that a random policy does something.

    Args:
        commands: Complete answers, such as `<action>left</action>`.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        super().__init__()
        self.commands = tuple(commands)

    def _drawn(self) -> str:
        return self.commands[int(self.np_random.integers(len(self.commands)))]

    def __repr__(self) -> str:
        return f"Commands({', '.join(self.commands)})"
