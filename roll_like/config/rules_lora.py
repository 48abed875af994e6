"""Rules of a reference model that is the trainer with its adapters switched off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from roll_like.config.sections import DeviceRange, TrainingConfig
from roll_like.config.violations import Violation


class _Reference(Protocol):
    """What both kinds of reference sections have."""

    @property
    def mode(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def workers(self) -> int: ...
    @property
    def max_tokens_per_micro_batch(self) -> int: ...


def adapter_off_means_something(
    reference: _Reference | None, training: TrainingConfig, devices: DeviceRange | None
) -> Iterator[Violation]:
    """Yield what does not go with `reference.mode: adapter_off`.

    Args:
        reference: The `reference` section.
        training: The `training` section.
        devices: `resources.device_mapping.reference`.
    """
    if reference is None or reference.mode != "adapter_off":
        return
    if training.lora is None:
        yield Violation(
            ("reference", "mode"),
            "'adapter_off' asks the trainer with its adapters switched off, and it has none; add `training.lora: {}`, "
            "or use mode: cluster",
        )
    if reference.path is not None:
        yield Violation(
            ("reference", "path"),
            f"{reference.path} would never be loaded: without adapters the trainer is model.path; remove the key, or "
            "use mode: cluster",
        )
    defaults = type(reference)()
    for key in ("workers", "max_tokens_per_micro_batch"):
        if getattr(reference, key) != getattr(defaults, key):
            yield Violation(
                ("reference", key),
                f"the trainer's own ranks are the reference, so training.{key} holds; remove the key, or use mode: "
                "cluster",
            )
    if devices is not None:
        yield Violation(
            ("resources", "device_mapping", "reference"),
            "these devices would stay idle, because the trainer is its own reference; remove the key, or use "
            "reference.mode: cluster",
        )
