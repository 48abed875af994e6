"""Settings that vLLM and SGLang share: arguments that are passed through to the engine, and sleep."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from roll_like.config.base import ConfigModel, Finding, Violation
from roll_like.config.inference import EngineConfig, engines_share_gpus
from roll_like.config.resources import ResourcesConfig
from roll_like.errors import ConfigError
from roll_like.registry import did_you_mean

#: Share of a GPU's memory that an engine may keep while a trainer works on the same GPU.
MOST_KEPT = 0.6


#: `kv_cache_dtype` of vLLM and SGLang where keys and values stay as they were computed, or are rounded to 16 bits.
WHOLE_CACHES = ("auto", "float16", "bfloat16", "bf16")


class PassedThrough(ConfigModel):
    """A section with a key `engine_args`, whose names must not be those that other keys set."""

    #: Arguments of the engine that a key of ours sets, and the key.
    owned_engine_args: ClassVar[Mapping[str, str]] = {}
    #: Arguments of the engine that cannot be changed, and why.
    fixed_engine_args: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def _not_set_elsewhere(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key in cls.owned_engine_args:
                raise ValueError(f"{key!r} is set by `{cls.owned_engine_args[key]}`; remove it from engine_args")
            if key in cls.fixed_engine_args:
                raise ValueError(f"{key!r} cannot be changed: {cls.fixed_engine_args[key]}; remove it from engine_args")
        return value

    # no decorator: the site's generator looks for the field in the class that has one
    _checked_engine_args = field_validator("engine_args", check_fields=False)(_not_set_elsewhere)


class SleepingEngineConfig(EngineConfig):
    """An engine that can free its GPU memory while a trainer works on the same GPUs."""

    sleep: bool | None = Field(
        default=None,
        description="Free GPU memory while a trainer works on the same GPUs. Default: yes. No effect if trainer and "
        "engines share no GPU.",
    )
    expert_parallel: bool = Field(
        default=False,
        description="For mixtures of experts on several GPUs for each engine: each expert is whole on one of them, in "
        "place of a slice on all. `--check` refuses it where there is nothing to divide (docs/moe.md).",
    )

    @property
    def approximates(self) -> str | None:
        """Weights, or keys and values (`engine_args`), in fewer bits than the trainer's."""
        kept = getattr(self, "engine_args", {}).get("kv_cache_dtype") or "auto"
        return super().approximates or (None if kept in WHOLE_CACHES else f"keys and values in {kept}")

    def sleeps(self, *, shares_gpus: bool) -> bool:
        """Return whether the engine frees its GPU memory while the trainer works."""
        return shares_gpus and self.sleep is not False

    def violations(self, resources: ResourcesConfig) -> Iterator[Violation]:
        """Yield an engine that leaves a colocated trainer too little memory, or has no GPUs to divide experts among."""
        equal = resources.devices_of("training") == resources.devices_of("inference")
        share = self.gpu_share
        if share is not None and share > MOST_KEPT and self.sleep is False and engines_share_gpus(resources) and equal:
            yield Violation(
                ("inference", "sleep"),
                f"the engine shares its GPUs with the trainer and would keep {share:.0%} of their memory while it "
                f"trains; set sleep: true, {self.gpu_memory_key} to {MOST_KEPT} or less, or disjoint device ranges",
            )
        gpus = 0 if resources.device == "cpu" else len(resources.devices_of("inference")) // self.replicas
        if self.expert_parallel and gpus < 2:
            has = "resources.device is cpu" if gpus == 0 else "each engine has one GPU"
            yield Violation(
                ("inference", "expert_parallel"),
                f"true divides experts among the GPUs of an engine, and {has}; lower inference.replicas, widen "
                "resources.device_mapping.inference, or set it to false",
            )

    def model_violations(self, *, experts: bool) -> Iterator[Violation]:
        """Yield experts that are to be divided where there are none."""
        if self.expert_parallel and not experts:
            yield Violation(("inference", "expert_parallel"), "the model has no experts to divide; set it to false")

    def without_effect(self, resources: ResourcesConfig) -> Iterator[Finding]:
        """Yield a `sleep` without effect."""
        if self.sleep is None or engines_share_gpus(resources):
            return
        why = (
            "resources.device is cpu, where there is no GPU memory to free"
            if resources.device == "cpu"
            else "the trainer works on other GPUs (resources.device_mapping)"
        )
        yield Finding.warning("inference.sleep", f"has no effect: {why}; remove the key")


def unknown_arguments(chosen: Iterable[str], known: Collection[str], documented: str) -> dict[str, str]:
    """Return the names that an engine does not have, each with a hint.

    Args:
        chosen: Names in `engine_args`.
        documented: Where the known names are documented, for names that resemble none.

    >>> unknown_arguments(["seed", "sead", "x"], ["seed"], "the manual")
    {'sead': "did you mean 'seed'?", 'x': 'see the manual'}
    """
    return {name: did_you_mean(name, known, f"see {documented}") for name in chosen if name not in known}


def require_known(section: str, library: str, chosen: Iterable[str], known: Collection[str], documented: str) -> None:
    """Refuse names in `engine_args` that an engine does not have; see `unknown_arguments`.

    Raises:
        ConfigError: Names the first, and the nearest right one.
    """
    for name, hint in unknown_arguments(chosen, known, documented).items():
        raise ConfigError(
            f"{section}.engine_args: the installed {library} has no argument {name!r}; {hint}",
            fix="correct the name, or remove it",
        )


def package_folder(package: str) -> Path | None:
    """Return where an installed package is, without importing it, which takes many seconds; None if it is not there."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else None


def fields_of(files: Iterable[Path], classes: Collection[str] | None = None) -> set[str]:
    """Return the annotated fields of the classes in source files: all of them, or some."""
    return {
        statement.target.id
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
