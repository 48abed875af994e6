"""A tokenizer with its chat template: messages to text, text to tokens, the only way there is."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from roll_like.content.unicode import whole_text
from roll_like.data.foreign import BREAK, ESCAPED, broken, pattern_of, shielded
from roll_like.data.images import ImageTokens, expanded, pictures_of
from roll_like.data.marks import call_marks
from roll_like.data.reasoning import after_prompt, known_tags
from roll_like.data.segments import Segments
from roll_like.data.token_bytes import Spelling, spelling_of
from roll_like.errors import EnvError
from roll_like.types import THINK, IntArray, Picture, PlacedImage, ReasoningTags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

#: A message as chat templates take it: `role`, `content`, and what a template knows beside (`tool_calls`, `name`).
ChatMessage: TypeAlias = Mapping[str, Any]


#: What to do about texts with tokens that the model does not have.
WITHOUT_UNKNOWN = "take its text out, or set model.tokenizer to the tokenizer that the model was trained with"


class UnseenImages(EnvError):
    """Messages have images that nothing would see."""


class Renderer:
    """A tokenizer with its chat template. One may serve any number of conversations of one thread.

    Args:
        tokenizer: Has a chat template.
        template_options: Further variables of the template, such as `enable_thinking`.
        images: Counts the tokens of images; None where messages are texts.
        reasoning: What delimits reasoning in responses; None where there is none; `auto`: what the template or the
            tokenizer shows, else `<think>` and `</think>`.
        stated_ends: Tokens that end a response by the model's own files, beside the template's and the tokenizer's.
        vocabulary: How many tokens the model knows; None where that is not known.
        date: The day that templates write which ask for one (`strftime_now`); default: today.
    """

    images: ImageTokens | None = None
    vocabulary: int | None = None
    _compiled: tuple[str, Any, dict[str, Any]] | None = None

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_options: Mapping[str, Any] | None = None,
        images: ImageTokens | None = None,
        reasoning: ReasoningTags | Literal["auto"] | None = "auto",
        stated_ends: Collection[int] = (),
        vocabulary: int | None = None,
        date: datetime.date | None = None,
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.images = images
        self.vocabulary = vocabulary
        self._stated_ends = frozenset(stated_ends)
        self.template_options = dict(template_options or {})
        self._date = date or datetime.date.today()
        #: Where turns end in what a template writes after their texts: what `roll_like.data.turns` has found so far.
        self.ends: dict[tuple[str, bool], int] = {}
        self._headers: dict[str, int | None] = {}
        special = {token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special | {self.tokenizer.eos_token_id} - {None})
        self._reasoning = reasoning

    @property
    def _run_date(self) -> datetime.date | None:
        """The date that the template writes; without it prompts would change at midnight."""
        return self._date if any("strftime_now" in template for template in self.templates) else None

    @property
    def _variables(self) -> dict[str, Any]:
        """What a template is given beside messages."""
        return {**({"strftime_now": date.strftime} if (date := self._run_date) else {}), **self.template_options}

    @cached_property
    def fingerprint(self) -> str | None:
        """Hash of all that decides which tokens messages become; None where it is not known.

        It is not of tokenizers that are written in Python, and where images become tokens too.
        """
        if self.images is not None or not getattr(self.tokenizer, "is_fast", False):
            return None
        model = json.loads(self.tokenizer.backend_tokenizer.to_str())
        parts = [
            # calls leave these two as they were asked for last, and no call here asks for any
            {name: value for name, value in model.items() if name not in ("padding", "truncation")},
            self.tokenizer.chat_template,
            {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()},
            sorted(self.special_ids),
            self.tokenizer.eos_token_id,
            bool(getattr(self.tokenizer, "split_special_tokens", False)),
            f"{type(self.tokenizer).__module__}.{type(self.tokenizer).__qualname__}",
            self.template_options,
            date.isoformat() if (date := self._run_date) else None,
            self.vocabulary,
            sorted(self._stated_ends),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token after an assistant's text that is answered, or None where the template writes none."""
        return self._special_after_turn(_USER)

    @cached_property
    def turn_end(self) -> int | None:
        """The special token that a policy ends its turn with, or None where the template writes none.

        Templates may end the last turn with another token than earlier ones (harmony: `<|return|>` and `<|end|>`, which
        also stands between the parts of one turn), or say by the next turn's header alone that one has ended.
        """
        last = self._special_after_turn()
        return self.end_of_turn if last is None else last

    def header_after_turn(self, role: str) -> int | None:
        """Return the token that ends a turn by beginning the next message, of this role; None where others end it.

        GLM's templates write nothing behind an assistant's text; its models end with `<|user|>` or `<|observation|>`.
        """
        if role not in self._headers:
            alone = self._special_after_turn() is None
            header = self._special_after_turn({"role": role, "content": "."}) if alone else None
            self._headers[role] = header if header in self.stop_ids else None
        return self._headers[role]

    def _special_after_turn(self, *following: ChatMessage) -> int | None:
        mark = sentinel("")
        try:
            text = self._rendered(
                [_USER, {"role": "assistant", "content": mark}, *following], (), generation_prompt=bool(following)
            )
        except EnvError:
            return None
        if mark not in text:
            return None
        after = self.encode(text.partition(mark)[2])
        at = self.first_special(after)
        return None if at is None else int(after[at])

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a response, in every engine."""
        return self._stated_ends | frozenset({self.turn_end, self.tokenizer.eos_token_id} - {None})

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn and are no part of its text."""
        return self.stop_ids if self.end_of_turn is None else self.stop_ids | {self.end_of_turn}

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        foreign_answers: bool = False,
    ) -> str:
        """Return the template's text of messages, with or without the generation prompt; `encode` takes it.

        What users, tools and environments say, and what schemas of tools do, has a `BREAK` where it spells a mark of a
        turn: `roll_like.data.foreign`. With `foreign_answers` so have assistants' messages, which another model wrote.

        Raises:
            EnvError: The template refuses the messages.
            UnseenImages: They have images, and the model or the pipeline takes texts.
        """
        if self.images is None and pictures_of(messages):
            raise UnseenImages(
                "the row has images, and the model or the pipeline takes texts",
                fix="set model.path to a vision-language model, with `pipeline` sft, rlvr or dpo (docs/vision.md); to "
                "ignore a column of images, set the source's images_field: null",
            )
        shown = self._shielded(messages, tools, answers=foreign_answers)
        text = self._rendered(*shown, generation_prompt=generation_prompt)
        return text.replace(ESCAPED, BREAK)

    def _rendered(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        try:
            text = self._apply(messages, tools, generation_prompt=generation_prompt)
        except (
            TemplateError,
            TypeError,
        ) as error:  # a TypeError is a message without text where the template adds it up
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise EnvError(
                f"the chat template refuses messages with the roles {roles}: {error}",
                fix="change the messages that the environment gives, or model.chat_template",
            ) from error
        return whole_text(text)

    def _shielded(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, answers: bool = False
    ) -> tuple[Sequence[ChatMessage], Sequence[Mapping[str, Any]]]:
        marks, results = self._marks
        return (messages, tools) if results is None else (
            shielded(messages, marks, results, answers=answers), [broken(tool, results) for tool in tools]
        )  # fmt: skip

    @cached_property
    def _marks(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """What is broken in messages, and in tools' results; nothing where the template marks no turns by tokens."""
        said: ChatMessage = {"role": "assistant", "content": "."}
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        turns = self._tokens_around([_USER, said, _USER])
        if turns is None:  # it wants other messages: any special token may be one of its marks
            turns = special
        elif not turns:
            return None, None
        function = {"name": "f", "arguments": json.dumps({}) if self.takes_text_arguments else {}}
        called = {**said, "tool_calls": [{"id": "callaaaaa", "type": "function", "function": function}]}
        result = {"role": "tool", "name": "f", "tool_call_id": "callaaaaa", "content": "."}
        turns = turns | (self._tokens_around([{"role": "system", "content": "."}, _USER, said]) or set())
        ends = {self.tokenizer.convert_ids_to_tokens(end) for end in self.end_ids}
        tags = self.reasoning
        # messages of every kind end alike where an answer has a tag of its own
        thinks = set() if tags is None or tags.final else {tags.open.strip(), tags.close.strip()}
        marks = (turns - thinks) | {end for end in ends if end}
        results = (special | (self._tokens_around([_USER, called, result, said]) or set())) - thinks
        return pattern_of(marks), pattern_of(marks | results)

    def _tokens_around(self, messages: Sequence[ChatMessage]) -> set[str] | None:
        """Return the added tokens that the template writes, whether the model has them or not; None if it refuses."""
        try:
            text = self._rendered(messages, (), generation_prompt=False)
        except EnvError:
            return None
        added = self.tokenizer.added_tokens_decoder
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        found = {added[token_id].content for token_id in ids if token_id in added}
        return {token for token in found if token in text}  # a token of a byte may be one as well

    def _apply(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        if any(message.get("tool_calls") for message in messages) and self.takes_text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        return self._written(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=generation_prompt,
        )

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether the template takes the arguments of tool calls as JSON text (DeepSeek's do), not as an object.

        Such a template adds an object to a text, which fails, or writes it as Python does: `{'a': None}`.
        """
        found = self._shown_call({"k": _PROBE, "n": None})
        if found is not None and f"'{_PROBE}'" not in found:
            return False
        told = self._shown_call(json.dumps({"k": _PROBE, "n": None}))
        return told is not None and f'"{_PROBE}"' in told

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes the schemas of tools."""
        function = {"name": _PROBE, "description": ".", "parameters": {"type": "object", "properties": {}}}
        try:
            text = self.render([_USER], [{"type": "function", "function": function}])
        except EnvError:  # it wants other messages, or other tools
            return True
        return _PROBE in text

    def _shown_call(self, arguments: Any) -> str | None:
        """Return the template's text of a tool call; None where it fails."""
        function = {"name": "f", "arguments": arguments}
        calls = [{"id": "callaaaaa", "type": "function", "function": function}]  # Mistral's ids have nine characters
        messages = [_USER, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self._variables)
        except (TemplateError, TypeError, AttributeError):
            return None
        return str(text)

    def _written(self, messages: Sequence[Any], **variables: Any) -> str:
        """Return the tokenizer's writing of messages, without what it looks up anew for each."""
        from transformers import PreTrainedTokenizerBase
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = self.tokenizer.chat_template
        own = type(self.tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        if own or not isinstance(template, str):
            written = self.tokenizer.apply_chat_template(messages, tokenize=False, **variables, **self._variables)
            return str(written)
        if self._compiled is None or self._compiled[0] != template:
            words = {**self.tokenizer.special_tokens_map, **self._variables}
            compiled = _compile_jinja_template(template)
            compiled.globals = dict(compiled.globals)  # each text copies it: a chain of dictionaries takes long
            self._compiled = (template, compiled, words)
        _, compiled, words = self._compiled
        return str(compiled.render(messages=messages, documents=None, **variables, **words))

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process gets: a compiled template cannot be sent."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_compiled", "_segments")}

    @cached_property
    def reasoning(self) -> ReasoningTags | None:
        """What delimits reasoning in responses, whatever the prompt; None where there is none."""
        if not isinstance(self._reasoning, str):
            return self._reasoning
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        return known_tags("\n".join(self.templates), added) or THINK

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """The special tokens that mean something in a response: they delimit reasoning, or mark calls."""
        tags = self.reasoning
        delimiters = "" if tags is None else "".join((tags.open, tags.close, tags.final, *tags.around))
        ids = self.special_ids.intersection(self.encode(delimiters).tolist())
        return tuple(sorted(call_marks(self.tokenizer).union(self.decode([token_id]) for token_id in ids)))

    def reasoning_after(self, prompt: str) -> ReasoningTags | None:
        """Return what delimits reasoning in the response to a prompt, which may begin it; None where there is none."""
        return after_prompt(self.reasoning, prompt)

    @cached_property
    def templates(self) -> Sequence[str]:
        """The chat template, or all that the tokenizer has."""
        template = self.tokenizer.chat_template
        return list(template.values()) if isinstance(template, Mapping) else [template or ""]

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template says with `{% generation %}` blocks what an assistant writes."""
        return any(_GENERATION_BLOCK.search(text) for text in self.templates)

    def generated(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[int, int], ...]:
        """Return where the template's `{% generation %}` blocks are in the rendering without generation prompt.

        The template must take the messages, which `render` tells.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        messages, tools = self._shielded(messages, tools)
        schemas = [dict(tool) for tool in tools] or None
        as_text = self.takes_text_arguments
        texts, ranges = render_jinja_template(
            [[dict(_with_text_arguments(message) if as_text else message) for message in messages]],
            tools=schemas,
            chat_template=self.tokenizer.get_chat_template(None, schemas),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self._variables},
        )
        text, longer = texts[0], len(ESCAPED) - len(BREAK)
        begin_end = (tuple(int(at) - longer * text.count(ESCAPED, 0, int(at)) for at in each) for each in ranges[0])
        return tuple((begin, end) for begin, end in begin_end)

    def encode(self, text: str) -> IntArray:
        """Return the tokens of a rendered text, shape [T]; nothing is added to it.

        Raises:
            EnvError: The model does not have one of them.
        """
        if BREAK in text:
            ids = self.encode_pieces([(text, True)])[0]
        else:
            ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        unknown = self.unknown(ids)
        if unknown is not None:
            raise EnvError(f"a text has {unknown}", fix=WITHOUT_UNKNOWN)
        return ids

    def unknown(self, token_ids: IntArray) -> str | None:
        """Return, in words, the first token that the tokenizer has and the model has not; None without one."""
        if self.vocabulary is None or not len(token_ids) or int(token_ids.max()) < self.vocabulary:
            return None
        first = int(token_ids[token_ids >= self.vocabulary][0])
        return (
            f"the token {self.tokenizer.convert_ids_to_tokens(first)!r} ({first}), and the model's embedding has "
            f"{self.vocabulary} rows"
        )

    @cached_property
    def _anchor(self) -> str:
        """What to put before a text so that it is tokenised as the middle of a sequence; often nothing.

        Tokenizers of the SentencePiece kind put a space before the first word of a sequence.
        """
        eos, eos_id = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        if eos is None:
            return ""
        begun, after = self.encode("a").tolist(), self.encode(f"{eos}a").tolist()
        return str(eos) if after[:1] == [eos_id] and after[1:] != begun else ""

    @cached_property
    def _joint(self) -> tuple[str, int]:
        """What to put before a text that goes on within a word, and how many tokens that is; often nothing.

        Some tokenizers put a space behind special tokens too (Llama 2, Mistral 7B v0.1).
        """
        if self._anchor:
            return self._anchor, 1
        joint = BREAK[0]  # in no vocabulary: nothing begins with it
        alone, before, both = self.encode_pieces([(text, True) for text in ("a", joint, joint + "a")])
        found, after = both[: len(before)], both[len(before) :]
        needed = np.array_equal(found, before) and not np.array_equal(after, alone)
        return (joint, len(before)) if needed else ("", 0)

    @cached_property
    def _segments(self) -> Segments | None:
        return Segments.of(self.tokenizer)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[IntArray]:
        """Return the tokens of texts in one call of the tokenizer, which is several times as fast.

        Some may be `unknown` to the model.

        Args:
            pieces: Texts; each with whether it begins a sequence, or goes on with one.
        """
        if not pieces:
            return []
        cut = [text.split(BREAK) for text, _ in pieces]
        anchors = [
            self._joint if at else ("", 0) if begins else (self._anchor, bool(self._anchor))
            for (_, begins), parts in zip(pieces, cut, strict=True)
            for at in range(len(parts))
        ]
        texts = [anchor + part for (anchor, _), part in zip(anchors, chain.from_iterable(cut), strict=True)]
        if self._segments is None:
            encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        else:
            encoded = self._segments.encode(texts)
        tokens = (np.asarray(ids[known:], np.int32) for (_, known), ids in zip(anchors, encoded, strict=True))
        return [np.concatenate(list(islice(tokens, len(parts)))) for parts in cut]

    def expanded(
        self, token_ids: IntArray, pictures: Sequence[Picture], origin: str
    ) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """Return tokens with all placeholders of their images, and where these are: `roll_like.data.images`."""
        return (token_ids, ()) if self.images is None else expanded(token_ids, pictures, self.images, origin)

    @cached_property
    def placeholder(self) -> re.Pattern[str] | None:
        """What finds the placeholder of an image in a text; None where messages are texts."""
        return None if self.images is None else pattern_of([self.tokenizer.convert_ids_to_tokens(self.images.token)])

    def decode(self, token_ids: npt.ArrayLike) -> str:
        """Return the text of tokens, special ones included."""
        ids = np.asarray(token_ids).tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _spelling(self) -> Spelling | None:
        return spelling_of(self.tokenizer)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token spells, in UTF-8: a part of a character, where the tokenizer has divided one."""
        token, spelling = self.tokenizer.convert_ids_to_tokens(token_id), self._spelling
        if token is None:
            return b""
        if spelling is None or (token_id in self.tokenizer.added_tokens_decoder and not spelling.is_byte(token)):
            return self.decode([token_id]).encode()
        return spelling.bytes_of(token)

    def first_special(self, token_ids: IntArray) -> int | None:
        """Return the place of the first special token."""
        return next((at for at, token_id in enumerate(token_ids.tolist()) if token_id in self.special_ids), None)

    def glue(
        self, history: Sequence[ChatMessage], turn: ChatMessage, new: Sequence[ChatMessage], tools: Sequence[Any]
    ) -> str | None:
        """Return what the template writes after an assistant's turn: its end, the new messages, the next header.

        None where the template does not write the turn's text exactly once.
        """
        mark = sentinel(str((history, new, tools)))
        try:
            text = self.render([*history, {**turn, "content": mark}, *new], tools)
        except EnvError:
            return None
        if text.count(mark) != 1:
            return None
        after = text.partition(mark)[2]
        if turn.get("tool_calls"):  # they stand between the text and the end of the turn
            at = -1 if self.end_of_turn is None else after.find(self.decode([self.end_of_turn]))
            return after[at:] if at >= 0 else None
        return after


_USER: ChatMessage = {"role": "user", "content": "."}


_PROBE = "xqargumentqx"


def _with_text_arguments(message: ChatMessage) -> ChatMessage:
    """Return a message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def sentinel(text: str) -> str:
    """Return a word that is not in `text`, and that no template has a reason to change."""
    number = 0
    while (mark := f"xq{number}turnqx") in text:
        number += 1
    return mark


def squeezed(text: str) -> str:
    """Return a text without its white space."""
    return "".join(text.split())
