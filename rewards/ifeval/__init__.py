"""Verifiable instructions: whether a response does what its prompt says about form.

A row names its instructions beside the prompt:

    {"prompt": "Describe bread without commas.", "instructions": [{"kind": "no_commas"}]}

Rows of the IFEval data set, with `instruction_id_list` and `kwargs`, are taken as they are.
`rewards.ifeval.kinds` holds every kind, `rewards.guards` what gets 0 although its form is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from roll_like import Completion, Reward, RewardCase, RewardConfig, RewardResult, register_reward
from roll_like.builtin.rewards import guards
from roll_like.builtin.rewards.ifeval.ids import translate_ids
from roll_like.builtin.rewards.ifeval.kinds import Instruction, parse_instructions
from roll_like.builtin.rewards.ifeval.text import fold, is_bullet, words
from roll_like.errors import DataError, RewardError
from roll_like.types import StopReason, Task

_FEWEST_FOR_PROSE = 8
_SHORTEST_GOLD = 13


class IFEvalConfig(RewardConfig):
    """Settings of the `ifeval` reward."""

    type: Literal["ifeval"] = "ifeval"
    mode: Literal["strict", "loose"] = Field(
        default="strict",
        description="strict: the response as it is. loose: also without its first line, last line, both, or asterisks.",
    )
    partial: bool = Field(default=False, description="Reward the fraction of instructions followed; else all or none.")
    min_words: int = Field(default=4, ge=0, description="Shorter responses get 0. Words.")
    max_copy: float = Field(
        default=0.5, ge=0, le=1, description="Largest share of four-word sequences taken from the prompt."
    )
    min_distinct: float = Field(
        default=0.5, ge=0, le=1, description="Smallest share of distinct words in any 20 words; less is a loop."
    )
    min_letters: float = Field(
        default=0.5, ge=0, le=1, description="Smallest share of letters and digits among visible characters."
    )
    min_wordlike: float = Field(
        default=0.8, ge=0, le=1, description="Smallest share of words that have the shape of English words."
    )
    min_function_words: float = Field(
        default=0.15,
        ge=0,
        le=1,
        description="Smallest share of words like `the` and `of` in prose; 0 for other languages.",
    )
    must_finish: bool = Field(default=False, description="Score a response 0 if the token limit cut it.")
    topic_field: str | None = Field(
        default=None, description="Row field with the topic; a response that names none of its words gets 0."
    )


@register_reward("ifeval")
class IFEval(Reward):
    """1 where a response follows its row's instructions and is an answer at all, else 0."""

    Config: ClassVar[type[RewardConfig]] = IFEvalConfig
    per_sample: ClassVar[bool] = True

    config: IFEvalConfig

    def check_row(self, task: Task) -> None:
        """Check that the row's instructions can be checked.

        Raises:
            DataError: A kind is unknown or its settings are wrong.
        """
        _instructions(task.metadata, error=DataError, where=f"{task.origin}: ")
        field = self.config.topic_field
        if field is not None and not isinstance(task.metadata.get(field), str):
            raise DataError(
                f"{task.origin}: the field {field!r} should hold the topic as text, found {task.metadata.get(field)!r}",
                fix="add the field to the row, or remove `topic_field` from the ifeval reward",
            )

    def score(self, completions: Sequence[Completion]) -> Sequence[RewardResult]:
        """Return a result for each completion, with figures for each kind and guard."""
        return [self._score_one(completion) for completion in completions]

    def cases(self) -> Sequence[RewardCase]:
        """Return two instructions, with answers that follow them and ways around an answer."""
        if self.config.topic_field is not None or self.config.min_words > _SHORTEST_GOLD:
            return ()
        prompt = "Describe an old lighthouse without commas. Use the word harbour."
        gold = "The old lighthouse has guided ships into the harbour for a hundred years."
        return (
            RewardCase(
                prompt=prompt,
                metadata={"instructions": [{"kind": "no_commas"}, {"kind": "keyword", "word": "harbour"}]},
                gold=(gold,),
                wrong=(gold.replace("ships", "ships, boats"), "Ships and boats, big and small, see it from afar."),
                hostile=("harbour", prompt, " ".join(["harbour"] * 40), "xkqj zvbn qwrt harbour plmk jhgf dszx"),
            ),
        )

    def _score_one(self, completion: Completion) -> RewardResult:
        instructions = _instructions(completion.metadata, error=RewardError)
        strict = [instruction.follows(completion.text) for instruction in instructions]
        variants = loose_variants(completion.text)
        loose = [any(map(instruction.follows, variants)) for instruction in instructions]
        hits = self._guards(completion, instructions)
        chosen = strict if self.config.mode == "strict" else loose
        followed = sum(chosen) / len(chosen) if self.config.partial else float(all(chosen))
        details = {"strict": float(all(strict)), "loose": float(all(loose)), "guarded": float(any(hits.values()))}
        for instruction, passed in zip(instructions, chosen, strict=True):
            key = f"kind/{instruction.kind}"
            details[key] = min(details.get(key, 1.0), float(passed))
        details |= {f"guard/{name}": float(hit) for name, hit in hits.items()}
        return RewardResult(0.0 if any(hits.values()) else followed, details)

    def _guards(self, completion: Completion, instructions: Sequence[Instruction]) -> dict[str, bool]:
        """Return which guards the response runs into."""
        config = self.config
        own = completion.text
        for instruction in instructions:
            own = instruction.own_words(own)
        found = [fold(word) for word in words(own)]
        prompt = [fold(word) for message in completion.messages for word in words(message["content"])]
        hits = {
            "too_short": len(found) < config.min_words,
            "copied": guards.copied_share(found, prompt) > config.max_copy,
            "repetitive": guards.distinct_share(found) < config.min_distinct,
            "few_letters": guards.letter_share(own) < config.min_letters,
            "gibberish": guards.wordlike_share(words(own)) < config.min_wordlike,
        }
        if all(instruction.prose for instruction in instructions):
            prose = words("\n".join(line for line in own.splitlines() if not is_bullet(line)))
            enough = guards.function_word_share(prose) >= config.min_function_words
            hits["word_salad"] = len(prose) >= _FEWEST_FOR_PROSE and not enough
        if config.must_finish:
            hits["unfinished"] = completion.stop_reason is not StopReason.STOP
        if config.topic_field is not None:
            topic = completion.metadata.get(config.topic_field)
            hits["off_topic"] = not guards.mentions(words(own), words(str(topic or "")))
        return hits


def loose_variants(text: str) -> tuple[str, ...]:
    """Return the 8 readings of IFEval's loose mode: without first line, last line, both; with and without asterisks."""
    lines = text.split("\n")
    cuts = (lines, lines[1:], lines[:-1], lines[1:-1])
    readings = ["\n".join(cut).strip() for cut in cuts]
    return (*readings, *(reading.replace("*", "") for reading in readings))


def _instructions(
    metadata: Mapping[str, Any], *, error: type[DataError] | type[RewardError], where: str = ""
) -> tuple[Instruction, ...]:
    field = "instructions"
    try:
        if metadata.get(field) is None and metadata.get("instruction_id_list") is not None:
            field = "instruction_id_list"
            return parse_instructions(translate_ids(metadata[field], metadata.get("kwargs")))
        if metadata.get(field) is None:
            raise ValueError("the row has neither it nor `instruction_id_list` of the IFEval data set")
        return parse_instructions(metadata.get(field))
    except ValueError as problem:
        raise error(f"{where}the field {field!r} cannot be checked: {problem}", fix="correct the row") from problem
