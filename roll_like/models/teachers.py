"""The teachers of a run, before they are started: which model each is, where it goes, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_like.config.resources import DeviceRange
from roll_like.config.run import RunConfig
from roll_like.config.teachers import TeacherConfig, teacher_key, teacher_model
from roll_like.config.training import TrainingConfig
from roll_like.errors import ConfigError
from roll_like.models.load import ResolvedModel, load_tokenizer, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTeacher:
    """A teacher that can be started.

    Attributes:
        name: Its name.
        model: What it is.
        training: What it computes with.
        devices: Its devices.
    """

    name: str
    model: ResolvedModel
    training: TrainingConfig
    devices: DeviceRange


def planned_teachers(config: RunConfig, teachers: Mapping[str, TeacherConfig]) -> Iterator[PlannedTeacher]:
    """Yield the teachers of a run's section.

    Raises:
        ConfigError: One has another tokenizer than the student.
    """
    ours = load_tokenizer(config.model)
    for name, teacher in teachers.items():
        section, key = teacher_model(config.model, teacher), teacher_key(name)
        if not teacher.other_tokenizer:
            refuse_other_tokenizer(ours, load_tokenizer(section, key=key), key=key, path=teacher.path)
        yield PlannedTeacher(
            name=name,
            model=resolve_model(section, key=key),
            training=config.training.frozen(
                workers=teacher.workers, max_tokens_per_micro_batch=teacher.max_tokens_per_micro_batch
            ),
            devices=teacher.devices or config.resources.devices_of("training"),
        )


def refuse_other_tokenizer(
    ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, *, key: str, path: str
) -> None:
    """Raise a ConfigError where a student's and a teacher's tokenizer give a token different ids.

    Args:
        theirs: The teacher's.
        key: The key that names the teacher.
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
        fix="use a teacher of the student's family; or set `other_tokenizer: true` of the teacher, which compares them "
        "over texts; or train on its answers with `pipeline: sft`",
    )
