"""The `teachers` section: models that students learn from, each for the domains that it knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, TypeAlias

from pydantic import Field

from roll_like.config.base import ConfigModel, PositiveInt, Violation
from roll_like.config.model import ModelConfig
from roll_like.config.resources import DeviceRange, ResourcesConfig, RolePlan
from roll_like.config.training import budget_violations
from roll_like.errors import ConfigError


class TeacherConfig(ConfigModel):
    """A frozen model that a student learns from."""

    path: str = Field(
        description="The teacher: a local directory or a hub id; GGUF and `package://` as `model.path`. Its tokenizer "
        "must be the student's, unless `other_tokenizer` is set."
    )
    other_tokenizer: bool = Field(
        default=False,
        description="The teacher has another tokenizer and chat template: it reads the messages and the text of "
        "answers in its own tokens, and is compared over the shortest stretches of text that both tokenizers divide "
        "alike.",
    )
    domains: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None, description="Domains of the data that it teaches; default: all that no other teacher names."
    )
    workers: PositiveInt = Field(default=1, description="Ranks of the teacher.")
    max_tokens_per_micro_batch: PositiveInt = Field(default=8192, description="Budget of one forward pass. Tokens.")
    devices: DeviceRange | None = Field(default=None, description="Its devices; default: those of `training`.")


#: Teachers, where a policy may teach itself.
OptionalTeachers: TypeAlias = dict[str, TeacherConfig]
TeacherConfigs: TypeAlias = Annotated[dict[str, TeacherConfig], Field(min_length=1)]


def teacher_of(teachers: Mapping[str, TeacherConfig], domain: str) -> str:
    """Return the name of a domain's teacher.

    Raises:
        ConfigError: There is none; a check refuses that, where it can read the rows.
    """
    for name, teacher in teachers.items():
        if teacher.domains is not None and domain in teacher.domains:
            return name
    for name, teacher in teachers.items():
        if teacher.domains is None:
            return name
    raise ConfigError(f"no teacher covers the domain {domain!r}", fix="add it to the `domains` of one in `teachers`")


def teacher_key(name: str) -> str:
    """Return the key of a teacher's model."""
    return f"teachers.{name}.path"


def teacher_model(model: ModelConfig, teacher: TeacherConfig) -> ModelConfig:
    """Return the `model` section of a teacher: the student's precision and chat template, its own tokenizer.

    With another tokenizer the chat template is its own, too.
    """
    section = model.at(teacher.path).model_copy(update={"tokenizer": None})
    if not teacher.other_tokenizer:
        return section
    return section.model_copy(update={"chat_template": None, "template_options": {}, "reasoning": "auto"})


def teacher_roles(resources: ResourcesConfig, teachers: Mapping[str, TeacherConfig]) -> list[RolePlan]:
    """Return where teachers sit."""
    roles = []
    for name, teacher in teachers.items():
        key, devices = f"teachers.{name}.workers", teacher.devices or resources.devices_of("training")
        path = ("resources", "device_mapping", "training") if teacher.devices is None else ("teachers", name, "devices")
        roles.append(resources.role(f"teacher {name}", teacher.workers, key, devices, path))
    return roles


def teacher_violations(
    teachers: Mapping[str, TeacherConfig], domains: Iterable[str | None], longest: int, terms: str
) -> Iterator[Violation]:
    """Yield domains without a teacher or with several, names that no data has, and budgets that are too small.

    Args:
        domains: Of the sources that are trained or measured on; None for one whose rows have their own.
        longest: Longest sample, in tokens.
    """
    known = [domain for domain in domains if domain is not None]
    if len(known) == len([*domains]):
        yield from domain_violations(teachers, known)
    general = [name for name, teacher in teachers.items() if teacher.domains is None]
    if len(general) > 1:
        yield Violation(
            ("teachers", general[1]),
            f"{general[0]!r} and {general[1]!r} name no domains, so that both would teach the same; name `domains`",
        )
    for name, teacher in teachers.items():
        yield from budget_violations(("teachers", name), teacher.max_tokens_per_micro_batch, longest, terms)


def domain_violations(teachers: Mapping[str, TeacherConfig], domains: Iterable[str]) -> Iterator[Violation]:
    """Yield domains without a teacher or with several, and names that no data has."""
    known = sorted(set(domains))
    named = [(domain, name) for name, teacher in teachers.items() for domain in teacher.domains or ()]
    for domain, name in named:
        others = [other for found, other in named if found == domain and other != name]
        if domain not in known:
            yield Violation(
                ("teachers", name, "domains"),
                f"no data is of domain {domain!r}; there are {', '.join(known)} (a source's `domain` or name)",
            )
        if others and name < others[0]:
            yield Violation(
                ("teachers", name, "domains"), f"{domain!r} is a domain of {others[0]!r} too; name one teacher a domain"
            )
    covered = {domain for domain, _ in named}
    orphans = [domain for domain in known if domain not in covered]
    if orphans and all(teacher.domains is not None for teacher in teachers.values()):
        yield Violation(
            ("teachers",),
            f"no teacher covers the domains {', '.join(orphans)}; add them to one's `domains`, or leave `domains` "
            "out of one teacher",
        )
