"""Which of a row's messages say that they are not to be trained on.

    {"role": "assistant", "content": "Wrong.", "weight": 0}

| key | in the data of |
|---|---|
| `weight` | OpenAI's fine-tuning, Mistral |
| `loss_mask`, `trainable` | verl |
| `train`, `training` | Axolotl |
| `loss` | ms-swift |
| `masked` | torchtune; the other way round |

The values are true and false, or 1 and 0, also as text. A message that has none is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll_like.data.bad_rows import BadRow, Problem
from roll_like.data.chat import ChatMessage
from roll_like.data.rows import Row
from roll_like.errors import DataError

#: Key → whether true means that the message is trained.
FLAGS: Mapping[str, bool] = {
    "weight": True,
    "loss_mask": True,
    "trainable": True,
    "train": True,
    "training": True,
    "loss": True,
    "masked": False,
}
#: What says more than yes or no.
_PARTS = ("train_detail", "training_detail", "loss_scale")
_WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def without_flags(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a message as templates take it.

    Raises:
        DataError: It says which part of it is trained, or how strongly.
    """
    for key in _PARTS:
        if message.get(key) is not None:
            raise DataError(
                f"{place}: has {key!r}; a message is trained as a whole, or not at all",
                fix=f"remove {key!r}, or split the message; {{weight: 0}} leaves a message out of the loss",
            )
    return {key: value for key, value in message.items() if key not in FLAGS and key not in _PARTS}


def untrained(row: Row, field: str, messages: Sequence[ChatMessage]) -> frozenset[int]:
    """Return the places of the assistant's messages that are not to be trained on.

    Args:
        messages: What was read from it: all, or the last of them.

    Raises:
        DataError: A flag is neither yes nor no, two contradict each other, or another's message is to be trained.
    """
    value = row.fields[field]
    entries = [value] if isinstance(value, Mapping) else value if isinstance(value, list) else []
    found = set()
    before = max(0, len(entries) - len(messages))
    for at, (entry, message) in enumerate(zip(entries[before:], messages, strict=False)):
        place = f"{row.origin}: message {before + at} in {field!r}"
        flags = {key: _flag(entry[key], key, place) for key in FLAGS if entry.get(key) is not None}
        if len(set(flags.values())) > 1:
            said = ", ".join(f"{key}: {entry[key]!r}" for key in flags)
            raise DataError(f"{place}: its flags contradict each other: {said}", fix="keep one of them")
        in_loss = next(iter(flags.values()), None)
        if message["role"] == "assistant":
            found |= {at} if in_loss is False else set()
        elif in_loss and not all(key in ("loss_mask", "loss") for key in flags):
            key = next(iter(flags))
            raise DataError(
                f"{place}: {key} is {entry[key]!r}, and the message is of the role {message['role']!r}; only the "
                "assistant's messages are trained",
                fix=f"remove {key!r} from messages of other roles",
            )
    return frozenset(found)


def require_trained(row: Row, field: str, response: Sequence[ChatMessage]) -> None:
    """Check that a response, with which the messages of a field end, is trained as a whole.

    Raises:
        DataError: It is not.
    """
    if untrained(row, field, response):
        raise DataError(
            f"{row.origin}: a message of the response in {field!r} has a flag that leaves it out of the loss, and a "
            "preference is about the whole response",
            fix="remove the message's flag, or begin the response after it",
        )


def left_out(what: str) -> BadRow:
    """Return the error of a row in which nothing is left to train, or not what should be."""
    return BadRow(
        Problem.UNTRAINED,
        f"{what} has a flag (weight: 0, …) that leaves it out of the loss",
        fix="correct the row",
    )


def yes_or_no(value: Any) -> bool | None:
    """Return what true, 1, `"true"` or `"1.0"` of a table say; None where it is something else."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def _flag(value: Any, key: str, place: str) -> bool:
    known = yes_or_no(value)
    if known is None:
        raise DataError(
            f"{place}: {key} is {value!r}; expected 1 or 0 (or true or false): there is no weight between",
            fix="round it, or repeat rows that should count more",
        )
    return known is FLAGS[key]
