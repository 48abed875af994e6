"""How reward functions of other libraries are called, and what they return.

An interface turns completions into the arguments of a call, and what comes back into results. `solution_str`,
`completions`, `response` and so on are everything that was sampled, reasoning included, as in those libraries; of an
episode they are its last turn.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from roll_like import Completion, RewardResult
from roll_like.errors import RewardError
from roll_like.types import StepScore, StopReason


@dataclass(frozen=True)
class Call:
    """The arguments of one call.

    Attributes:
        read: Turns what the function returns into a result for each answer; raises a `RewardError` for anything else.
        arguments: Positional ones.
        keywords: Named ones.
    """

    read: Callable[[Any], list[RewardResult]]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


class Interface(ABC):
    """One library's way to call a reward function.

    Args:
        function: The function.
        arguments: `arguments` of the reward's settings.

    Attributes:
        whole_groups: Whether one call scores a group; else it scores one answer.
    """

    whole_groups: ClassVar[bool] = False

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.function = function
        self.arguments = arguments
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._takes = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}

    @abstractmethod
    def call(self, completions: Sequence[Completion]) -> Call:
        """Return how the function is called for these answers: a group, or one."""

    def _taken(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Return those named arguments that the function takes, and all that the settings name."""
        return {
            **{name: value for name, value in offered.items() if self._takes_all or name in self._takes},
            **self.arguments,
        }


class Verl(Interface):
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`: a number, or a mapping with `score`.

    Numbers beside the score are details, and a text `pred` is the answer to vote over.
    """

    def call(self, completions: Sequence[Completion]) -> Call:
        """Return the four arguments, those of them that the row has and the function takes."""
        (completion,) = completions
        row = completion.metadata
        offered: dict[str, Any] = {
            "solution_str": completion.full_text,
            "ground_truth": _ground_truth(completion),
            # as in verl, the first prompt, every answer and what stands between two answers count
            "extra_info": {
                **_object(row, "extra_info"),
                "num_turns": 2 * max(1, len(completion.turns)),
                "rollout_reward_scores": {},
            },
        }
        if "data_source" in row:
            offered["data_source"] = row["data_source"]
        return Call(_read_one("score"), keywords=self._taken(offered))


class Trl(Interface):
    """`f(prompts, completions, **columns)` of TRL: a number for each answer, or None where it has nothing to say.

    Prompts and completions are lists of messages. An answer that the function abstains from gets 0, which is what None
    adds to TRL's sum of rewards. NaN, which TRL leaves out as it does None, fails here: it is what 0/0 gives in torch.
    """

    whole_groups = True

    def call(self, completions: Sequence[Completion]) -> Call:
        """Return the prompts, the answers, and each column as a list."""
        logged: dict[str, float] = {}

        def log_metric(name: str, value: float) -> None:
            logged[name] = float(value)

        def log_extra(name: str, values: Sequence[Any]) -> None:
            del name, values  # columns of TRL's table of answers

        def read(returned: Any) -> list[RewardResult]:
            return [
                RewardResult(0.0 if value is None else _number(value), {**logged, "abstained": float(value is None)})
                for value in _values(returned, len(completions))
            ]

        offered = {
            **{name: [each.metadata.get(name) for each in completions] for name in completions[0].metadata},
            "prompts": [self._prompt(completion) for completion in completions],
            "completions": [self._answer(completion) for completion in completions],
            "log_metric": log_metric,
            "log_extra": log_extra,
        }
        return Call(read, keywords=self._taken(offered))

    def _prompt(self, completion: Completion) -> Any:
        return [dict(message) for message in completion.messages]

    def _answer(self, completion: Completion) -> Any:
        return [{"role": "assistant", "content": completion.full_text}]


class TrlText(Trl):
    """The same for a dataset whose prompts are texts: prompts and completions are texts."""

    def _prompt(self, completion: Completion) -> Any:
        return _last(completion)

    def _answer(self, completion: Completion) -> Any:
        return completion.full_text


class OpenRlhf(Interface):
    """`reward_func(queries, prompts, labels)` of OpenRLHF: a tensor, or a mapping with `rewards`.

    A prompt is the text of the prompt's last message, without the chat template's marks; a query is the prompt and the
    answer behind it. `scores` and `extra_logs` are details.
    """

    def call(self, completions: Sequence[Completion]) -> Call:
        """Return three lists of one text."""
        (completion,) = completions
        prompt = _last(completion)
        texts = ([prompt + completion.full_text], [prompt], [_ground_truth(completion)])
        return Call(_read_one("rewards"), texts, self.arguments)


class Slime(Interface):
    """`custom_rm(args, sample)` of slime: a number, or a mapping of which `args.reward_key` is one.

    `args` has what `arguments` names. Where slime is imported the sample is its `Sample`, else something with the same
    prompt, response, label, metadata, response_length and status. The prompt is the text of its last message.
    """

    def call(self, completions: Sequence[Completion]) -> Call:
        """Return `args` and a sample."""
        (completion,) = completions
        row = completion.metadata
        metadata = row.get("metadata")
        status = "truncated" if completion.stop_reason is StopReason.LENGTH else "completed"
        slime = sys.modules.get("slime.utils.types")
        sample = (SimpleNamespace if slime is None else slime.Sample)(
            prompt=_last(completion),
            response=completion.full_text,
            label=row.get("label", _ground_truth(completion)),
            metadata=dict(metadata if isinstance(metadata, Mapping) else row),
            response_length=completion.response_tokens,
            status=status if slime is None else slime.Sample.Status(status),
        )
        args = SimpleNamespace(**{"reward_key": None, **self.arguments})
        return Call(_read_one(args.reward_key or "score"), (args, sample))


class AReaL(Interface):
    """`f(prompt, completions, prompt_ids, completion_ids, **columns)` of AReaL: a number. There are no token ids."""

    def call(self, completions: Sequence[Completion]) -> Call:
        """Return both texts and the row's columns."""
        (completion,) = completions
        columns = {"answer": completion.answer, **completion.metadata}
        return Call(_read_one("score"), (_last(completion), completion.full_text, None, None), self._taken(columns))


INTERFACES: Mapping[str, type[Interface]] = {
    "verl": Verl,
    "trl": Trl,
    "trl_text": TrlText,
    "openrlhf": OpenRlhf,
    "slime": Slime,
    "areal": AReaL,
}


def _ground_truth(completion: Completion) -> Any:
    """Return what verl's rows hold, which may be a list or a mapping; else the reference answer."""
    held = completion.metadata.get("reward_model")
    return held["ground_truth"] if isinstance(held, Mapping) and "ground_truth" in held else completion.answer


def _object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that holds a mapping, or a JSON object as text; nothing where it is empty."""
    held = found = row.get(name) or {}
    if isinstance(held, str):
        with contextlib.suppress(ValueError):
            found = json.loads(held)
    if not isinstance(found, Mapping):
        raise RewardError(
            f"the field {name!r} should hold a mapping or the text of a JSON object, found {held!r:.200}",
            fix=f"correct {name!r} in the rows",
        )
    return found


def _values(returned: Any, count: int) -> list[Any]:
    """Return what a list, tensor, array or generator of `count` numbers holds."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        found = f"{returned!r} ({type(returned).__name__})"
    elif len(values := list(values)) != count:
        found = f"a list of {len(values)}"
    else:
        return values
    raise RewardError(f"the function should return a list of {count} numbers, found {found}")


def _last(completion: Completion) -> str:
    return str(completion.messages[-1]["content"]) if completion.messages else ""


def _read_one(key: str) -> Callable[[Any], list[RewardResult]]:
    """Return what reads a number, or a mapping with the number under `key`; other numbers in it are details.

    A list `steps` in it has the scores of the answer's steps: `{"score": 0.9, "end": 25}` each, `end` in characters of
    what was sampled.
    """

    def read(returned: Any) -> list[RewardResult]:
        if not isinstance(returned, Mapping):
            return [RewardResult(_number(returned))]
        if key not in returned:
            raise RewardError(
                f"the function should return a mapping with {key!r}, found the keys {', '.join(returned)}"
            )
        others = {name: value for name, value in returned.items() if name != key}
        details = _numbers(others | dict(others.get("extra_logs") or {}))
        pred = returned.get("pred")
        answer, steps = pred if isinstance(pred, str) else None, _step_scores(returned.get("steps"))
        return [RewardResult(_number(returned[key]), details, answer, steps=steps)]

    return read


def _step_scores(given: Any) -> tuple[StepScore, ...]:
    """Return the scores of steps; a number, such as how many there are, or a list without mappings says none."""
    if not isinstance(given, Sequence) or not any(isinstance(step, Mapping) for step in given):
        return ()
    for step in given:
        if not isinstance(step, Mapping) or not {"score", "end"} <= step.keys():
            raise RewardError(f"`steps` should be a list of mappings with `score` and `end`, found {step!r:.80} in it")
        if not _number(step["end"]).is_integer():
            raise RewardError(f"the `end` of a step should be a whole number of characters, found {step['end']!r}")
    return tuple(StepScore(_number(step["score"]), int(_number(step["end"]))) for step in given)


def _number(value: Any) -> float:
    """Return a number, or the only one of an array, a tensor or a list."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        return _number(value[0])
    if not isinstance(value, int | float):
        raise RewardError(f"the function should return a number, found {value!r} ({type(value).__name__})")
    return float(value)


def _numbers(returned: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among the values of a mapping."""
    found = {}
    for name, value in returned.items():
        with contextlib.suppress(RewardError):
            found[str(name)] = _number(value)
    return {name: number for name, number in found.items() if math.isfinite(number)}
