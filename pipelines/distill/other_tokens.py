"""A teacher with another tokenizer: its tokens of the same conversations, and its answers in the student's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from roll_like.algorithms.distillation.spans import common_spans
from roll_like.builtin.pipelines.distill.answers import OwnTopKAnswers, TextAnswers
from roll_like.config.teachers import teacher_key
from roll_like.data.chat import Renderer
from roll_like.data.token_bytes import decoders_of, spelling_of
from roll_like.errors import ConfigError
from roll_like.types import TrainingSample


class TokenBytes:
    """The bytes that each token of a tokenizer spells.

    Args:
        key: The key that names its model, for messages.

    Attributes:
        of: By id; empty for special tokens, and for ids without a token.
        ids: The token that stands for some bytes, no special one: where several spell them, what the tokenizer itself
            writes, which is an added token before another one, and either before a single byte of SentencePiece.
        same: By id, the token of `ids` with the same bytes; the token itself where it spells nothing.

    Raises:
        ConfigError: Its tokens do not say what they spell.
    """

    def __init__(self, renderer: Renderer, key: str) -> None:
        tokenizer = renderer.tokenizer
        spelling = spelling_of(tokenizer)
        if spelling is None or spelling.takes_space:
            decoder = ", ".join(decoders_of(tokenizer)) or "unknown"
            raise ConfigError(
                f"{key}: its tokenizer ({type(tokenizer).__name__}, decoder {decoder}) does "
                "not say which bytes a token spells; expected one over bytes, or SentencePiece without a leading space",
                fix="use a teacher of another family; or train on its answers with `pipeline: sft`",
            )
        vocabulary, added = tokenizer.get_vocab(), set(tokenizer.added_tokens_decoder)
        self.of = [b""] * (max(vocabulary.values()) + 2)  # the last stands for ids without a token
        ranks = [0] * len(self.of)
        for token, token_id in vocabulary.items():
            if token_id not in renderer.special_ids:
                literal = token_id in added and spelling.byte_level  # SentencePiece writes ▁ in added tokens, too
                self.of[token_id] = token.encode() if literal else spelling.bytes_of(token)
                ranks[token_id] = 2 if spelling.is_byte(token) else int(token_id not in added)
        self.ids: dict[bytes, int] = {}
        for token_id in sorted(range(len(self.of)), key=lambda token_id: ranks[token_id]):
            if text := self.of[token_id]:
                self.ids.setdefault(text, token_id)
        self.same = np.array([self.ids.get(text, token_id) for token_id, text in enumerate(self.of)], np.int32)

    def spelled(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of tokens."""
        return [self.of[token_id] for token_id in token_ids]

    def without(self, other: TokenBytes) -> npt.NDArray[np.bool_]:
        """Return by id whether a token spells what no token of another tokenizer spells alone."""
        return np.array([bool(text) and text not in other.ids for text in self.of])


@dataclass(frozen=True, slots=True)
class _Turn:
    """A stretch of trained tokens: what it spells, and whether its last token ends the turn."""

    targets: slice
    ids: list[int]
    texts: list[bytes]
    ended: bool

    @property
    def text(self) -> bytes:
        return b"".join(self.texts)

    def ends(self) -> list[int]:
        """Return how many bytes the text has after each token; the end of the turn counts as one more."""
        lengths = [len(text) for text in self.texts]
        return list(accumulate([*lengths[:-1], 1] if self.ended else lengths))


def _turns(sample: TrainingSample, renderer: Renderer, tokens: TokenBytes) -> list[_Turn]:
    mask = np.concatenate([[False], sample.loss_mask, [False]])
    edges = np.flatnonzero(mask[1:] != mask[:-1])
    found, first = [], 0
    for begin, end in edges.reshape(-1, 2).tolist():
        ids = sample.token_ids[begin:end].tolist()
        ended = ids[-1] in renderer.end_ids
        found.append(_Turn(slice(first, first + len(ids)), ids, tokens.spelled(ids), ended))
        first += len(ids)
    return found


class Translation:
    """From a teacher's answers about its own tokens to outcomes in a student's tokens.

    Args:
        teacher: The teacher's.
        name: The teacher's name, for messages.

    Attributes:
        unmatched: The student's tokens whose text no token of the teacher spells, no special ones.

    Raises:
        ConfigError: One of the tokenizers does not say which bytes its tokens spell.
    """

    def __init__(self, student: Renderer, teacher: Renderer, *, name: str) -> None:
        self._student, self._teacher = student, teacher
        self._ours = TokenBytes(student, "model.path")
        self._theirs = TokenBytes(teacher, teacher_key(name))
        #: Our token for each of theirs, −1 for none.
        self._ours_of = np.array(
            [self._after(b"", b"", token_id) for token_id in range(len(self._theirs.of))], np.int32
        )
        self.unmatched = np.flatnonzero(self._ours.without(self._theirs)).astype(np.int32)
        self._theirs_alone = self._theirs.without(self._ours)

    def difference(self, ours: TrainingSample, theirs: TrainingSample) -> str | None:
        """Return how two tokenizations of one conversation train different texts; None where they do not."""
        our_turns = _turns(ours, self._student, self._ours)
        their_turns = _turns(theirs, self._teacher, self._theirs)
        if len(our_turns) != len(their_turns):
            return f"{len(our_turns)} stretches are trained, and {len(their_turns)} in the teacher's chat template"
        for one, other in zip(our_turns, their_turns, strict=True):
            if (one.text, one.ended) != (other.text, other.ended):
                ends = ["with" if each.ended else "without" for each in (one, other)]
                return (
                    f"{_shown(one.text)} {ends[0]} an end is trained, and in the teacher's chat template it is "
                    f"{_shown(other.text)} {ends[1]} one"
                )
        return None

    def answers(
        self, ours: Sequence[TrainingSample], theirs: Sequence[TrainingSample], told: OwnTopKAnswers
    ) -> TextAnswers:
        """Return a teacher's answers for all targets of our samples.

        Args:
            theirs: The conversations of `ours` in the teacher's tokens; none has a `difference`.
            told: The teacher's answers for their targets.
        """
        count, width = sum(sample.trained_tokens for sample in ours), told.ids_NK.shape[1] + 1
        found = TextAnswers(
            ids_NK=np.full((count, width), -1, np.int32),
            logprobs_NK=np.full((count, width), -np.inf, np.float32),
            spans_N=np.zeros(count, np.int32),
            entropy_N=np.zeros(count, np.float32),
            best_N=np.full(count, -1, np.int32),
        )
        found.ids_NK[:, 0] = np.concatenate([sample.token_ids[sample.loss_mask] for sample in ours])
        first = first_theirs = stretches = 0
        for sample, seen in zip(ours, theirs, strict=True):
            turns = zip(
                _turns(sample, self._student, self._ours), _turns(seen, self._teacher, self._theirs), strict=True
            )
            for one, other in turns:
                spans, their_spans = common_spans(one.ends(), other.ends())
                begin, their_begin = first + one.targets.start, first_theirs + other.targets.start
                found.spans_N[begin : begin + len(spans)] = spans + stretches
                count = int(spans[-1]) + 1
                edges, their_edges = (np.searchsorted(each, range(count + 1)) for each in (spans, their_spans))
                for index in range(count):
                    ours_at, theirs_at = (slice(*each[index : index + 2].tolist()) for each in (edges, their_edges))
                    self._fill(
                        found,
                        told,
                        begin + ours_at.stop - 1,
                        slice(their_begin + theirs_at.start, their_begin + theirs_at.stop),
                        b"".join(one.texts[ours_at][:-1]),
                        b"".join(other.texts[theirs_at][:-1]),
                        their_own=other.ids[theirs_at.stop - 1],
                    )
                stretches += count
            first, first_theirs = first + sample.trained_tokens, first_theirs + seen.trained_tokens
        return found

    def _fill(
        self,
        found: TextAnswers,
        told: OwnTopKAnswers,
        at: int,
        theirs: slice,
        prefix: bytes,
        their_prefix: bytes,
        *,
        their_own: int,
    ) -> None:
        """Write the outcomes of a stretch to its last token, target `at`.

        Args:
            found: Gets them.
            told: What the teacher says.
            theirs: The teacher's targets in the stretch.
            prefix: What our tokens before the last one spell.
            their_prefix: The same of the teacher's.
            their_own: The teacher's last token.
        """
        last = theirs.stop - 1
        likely = np.minimum(told.ids_NK[last], len(self._theirs.of) - 1)
        if prefix or their_prefix:
            ids = np.array([self._after(prefix, their_prefix, int(token)) for token in likely], np.int32)
        else:
            ids = self._ours_of[likely]
        own = int(found.ids_NK[at, 0])
        # one text is one outcome, in which the samples' own tokens stand for all that spell it
        ids = np.where((likely == their_own) | (ids == self._ours.same[own]), own, ids)
        told_for = (ids >= 0) | self._theirs_alone[likely]
        earlier = float(told.own_N[theirs.start : last].sum(dtype=np.float64))
        found.best_N[at] = ids[int(told.logprobs_NK[last].argmax())]
        told_for &= ids != own
        ids = np.where(ids == own, -1, ids)
        found.ids_NK[at, 1:] = ids
        found.logprobs_NK[at, 0] = earlier + float(told.own_N[last])
        found.logprobs_NK[at, 1:] = np.where(told_for, earlier + told.logprobs_NK[last], -np.inf)
        found.entropy_N[at] = told.entropy_N[last]

    def _after(self, prefix: bytes, their_prefix: bytes, token: int) -> int:
        """Return our token that spells after `prefix` what theirs spells after `their_prefix`; −1 if none does."""
        text = self._theirs.of[token]
        if not text or self._theirs.same[token] != token or not (their_prefix + text).startswith(prefix):
            return -1
        return self._ours.ids.get((their_prefix + text)[len(prefix) :], -1)


def _shown(text: bytes) -> str:
    shown = repr(text.decode(errors="replace"))
    return shown if len(shown) <= 60 else f"{shown[:57]}…'"
