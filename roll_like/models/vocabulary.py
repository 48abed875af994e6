"""Whether two models read and write the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_like.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def refuse_other_tokenizer(
    ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, *, key: str, path: str
) -> None:
    """Do nothing where both tokenizers give every token the same id.

    Args:
        ours: The student's.
        theirs: The teacher's.
        key: The key that names the teacher.
        path: What it says.

    Raises:
        ConfigError: They differ; says in how many tokens, and names one.
    """
    student, teacher = ours.get_vocab(), theirs.get_vocab()
    if student == teacher:
        return
    differing = sorted(token for token in {*student, *teacher} if student.get(token) != teacher.get(token))
    token = differing[0]
    raise ConfigError(
        f"{key}: the tokenizer of {path} is not the student's: {len(differing)} tokens differ, the first is {token!r} "
        f"with id {teacher.get(token, 'none')} there and {student.get(token, 'none')} here; distributions over "
        "different tokens cannot be compared",
        fix="use a teacher of the student's family; or, across families, let the teacher write answers "
        "(`roll-like` or any server), and train on the texts with `pipeline: sft`",
    )
