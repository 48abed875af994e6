"""The teachers of a run, before they are started: which model each is, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll_like.config.resources import DeviceRange
from roll_like.config.run import RunConfig
from roll_like.config.teachers import TeacherConfig, teacher_model
from roll_like.config.training import TrainingConfig
from roll_like.models.load import ResolvedModel, load_tokenizer, resolve_model
from roll_like.models.vocabulary import refuse_other_tokenizer


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
    """Yield a run's teachers.

    Args:
        config: The run's configuration.
        teachers: Its `teachers` section.

    Raises:
        ConfigError: One has another tokenizer than the student.
    """
    ours = load_tokenizer(config.model)
    for name, teacher in teachers.items():
        section = teacher_model(config.model, teacher)
        refuse_other_tokenizer(ours, load_tokenizer(section), key=f"teachers.{name}.path", path=teacher.path)
        yield PlannedTeacher(
            name=name,
            model=resolve_model(section),
            training=config.training.frozen(
                workers=teacher.workers, max_tokens_per_micro_batch=teacher.max_tokens_per_micro_batch
            ),
            devices=teacher.devices or config.resources.device_mapping.training,
        )
