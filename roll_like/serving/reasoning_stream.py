"""An answer that comes in pieces, divided into reasoning and content as it comes.

Wholes are divided by `split_turn`, at the last closing tag; what a stream has sent as content stays content.
"""

from __future__ import annotations

import re

from roll_like.data.reasoning import tag_pattern
from roll_like.types import ReasoningTags

_QUOTES = "`\"'“‘«「"
#: More characters than quotation marks around a tag.
_MOST_QUOTES = 16
#: More characters than a quotation of two tags has between them.
_MOST_QUOTED = 200
_LINE_ENDS = "\r\n"


class ReasoningStream:
    """The reasoning ends at the first closing tag that is not quoted; without an opening tag there is none.

    Args:
        tags: What delimits reasoning, and whether the prompt opened it.

    Attributes:
        ended: Whether the reasoning has ended, and the line breaks after it; what follows is the answer as it comes.
    """

    def __init__(self, tags: ReasoningTags) -> None:
        self._tags = tags
        self._pattern = tag_pattern(tags.open, tags.close)
        # a quotation of both tags whose end may come next
        self._quotes = re.compile(rf"[{_QUOTES}]{re.escape(tags.open)}[^\n]{{0,{_MOST_QUOTED}}}\Z")
        self._window = len(tags.open) + len(tags.close) + _MOST_QUOTED + 2 * _MOST_QUOTES
        self._text = ""
        self._shown = 0
        self._begun = tags.opened
        self._closed = False
        self.ended = False

    def add(self, piece: str) -> tuple[str, str]:
        """Return the reasoning and the answer that another piece adds."""
        self._text += piece
        return self._more(whole=False)

    def finish(self) -> tuple[str, str]:
        """Return what was held back, as it could have been the beginning of a tag."""
        return self._more(whole=True)

    def _more(self, *, whole: bool) -> tuple[str, str]:
        if not self._closed and not self._begins(whole=whole):
            return "", ""
        if self._closed:
            return "", self._rest()
        closing = self._closing()
        if closing is None or not (whole or self._is_certain(closing)):
            end = len(self._text) if whole else self._certain(closing)
            return self._until(end), ""
        before = self._until(max(self._shown, len(self._text[: closing.start()].rstrip(_LINE_ENDS))))
        self._text, self._shown, self._closed = self._text[closing.end() :], 0, True
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
        self._closed = not self._begun
        if self._shown == 0:
            self._text = self._text.lstrip(_LINE_ENDS) if self._begun else self._text
        return True

    def _until(self, end: int) -> str:
        shown, self._shown = self._text[self._shown : end], max(self._shown, end)
        return shown

    def _rest(self) -> str:
        if self._shown == 0 and self._begun:
            self._text = self._text.lstrip(_LINE_ENDS)
        self.ended = bool(self._text)
        return self._until(len(self._text))

    def _closing(self) -> re.Match[str] | None:
        """Return the first closing tag, looking from where a quotation may begin that goes on after what was sent."""
        found = self._pattern.finditer(self._text, max(0, self._shown - self._window))
        return next((each for each in found if each.lastgroup == "close" and each.start() >= self._shown), None)

    def _is_certain(self, closing: re.Match[str]) -> bool:
        """Return whether a closing tag is none that is quoted, as what follows may show."""
        after = self._text[closing.end() :]
        if after.strip("`") or len(after) >= _MOST_QUOTES:
            return True
        before = self._text[max(0, closing.start() - self._window) : closing.start()]
        return not before.endswith(tuple(_QUOTES)) and self._quotes.search(before) is None

    def _certain(self, closing: re.Match[str] | None) -> int:
        """Return up to where the text is reasoning whatever follows."""
        if closing is not None:
            end = closing.start()
        else:
            close = self._tags.close
            held = next((size for size in range(len(close), 0, -1) if self._text.endswith(close[:size])), 0)
            end = len(self._text) - held
        quoted = self._text[max(0, end - _MOST_QUOTES) : end]
        end -= len(quoted) - len(quoted.rstrip(_QUOTES))
        return max(self._shown, len(self._text[:end].rstrip(_LINE_ENDS)))
