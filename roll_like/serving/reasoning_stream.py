"""An answer that comes in pieces, divided into its reasoning and what follows: `split_reasoning` for streams."""

from __future__ import annotations

import re

from roll_like.data.reasoning import tag_pattern
from roll_like.types import ReasoningTags

_QUOTES = "`\"'“‘«「"
#: More characters than quotation marks around a tag.
_MOST_QUOTES = 16
_LINE_ENDS = "\r\n"


class ReasoningStream:
    """The reasoning ends at the first closing tag that is not quoted; without an opening tag there is none.

    Args:
        tags: What delimits reasoning, and whether the prompt opened it.
    """

    def __init__(self, tags: ReasoningTags) -> None:
        self._tags = tags
        self._pattern = tag_pattern(tags.open, tags.close)
        self._text = ""
        self._shown = 0
        self._begun = tags.opened
        self.ended = False

    def add(self, piece: str) -> tuple[str, str]:
        """Return the reasoning and the answer that another piece adds."""
        self._text += piece
        return self._more(whole=False)

    def finish(self) -> tuple[str, str]:
        """Return what was held back, as it could have been the beginning of a tag."""
        return self._more(whole=True)

    def _more(self, *, whole: bool) -> tuple[str, str]:
        if not self.ended and not self._begins(whole=whole):
            return "", ""
        if self.ended:
            return "", self._rest()
        closing = self._closing(whole=whole)
        if closing is None:
            end = len(self._text) if whole else self._certain()
            return self._until(end), ""
        before = self._until(max(self._shown, len(self._text[: closing.start()].rstrip(_LINE_ENDS))))
        self._text, self._shown, self.ended = self._text[closing.end() :], 0, True
        return before, self._rest()

    def _begins(self, *, whole: bool) -> bool:
        """Return whether it is known how the answer begins; without an opening tag its reasoning has ended."""
        text = self._text.lstrip()
        if text.startswith(self._tags.open):  # also where the prompt has opened it already
            if self._shown == 0:
                self._text = text[len(self._tags.open) :].lstrip(_LINE_ENDS)
                self._begun = True
        elif not whole and self._shown == 0 and self._tags.open.startswith(text):
            return False
        self.ended = not self._begun
        if self._shown == 0:
            self._text = self._text.lstrip(_LINE_ENDS) if self._begun else self._text
        return True

    def _until(self, end: int) -> str:
        shown, self._shown = self._text[self._shown : end], max(self._shown, end)
        return shown

    def _rest(self) -> str:
        if self._shown == 0 and self._begun:
            self._text = self._text.lstrip(_LINE_ENDS)
        return self._until(len(self._text))

    def _closing(self, *, whole: bool) -> re.Match[str] | None:
        found = (each for each in self._pattern.finditer(self._text, self._shown) if each.lastgroup == "close")
        closing = next(found, None)
        if closing is None or whole or closing.end() < len(self._text):
            return closing
        return None if self._text[: closing.start()].endswith(tuple(_QUOTES)) else closing  # a quotation may end next

    def _certain(self) -> int:
        """Return up to where the text is reasoning whatever follows."""
        close = self._tags.close
        held = next((size for size in range(len(close), 0, -1) if self._text.endswith(close[:size])), 0)
        end = len(self._text) - held
        quoted = self._text[max(0, end - _MOST_QUOTES) : end]
        end -= len(quoted) - len(quoted.rstrip(_QUOTES))
        return max(self._shown, len(self._text[:end].rstrip(_LINE_ENDS)))
