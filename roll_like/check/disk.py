"""What a run writes to disk."""

from __future__ import annotations

from dataclasses import dataclass

from roll_like.check.plan import GIB, bytes_per_value, trained_parameters
from roll_like.config.run import RunConfig
from roll_like.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a run writes beside its figures, which are small.

    Attributes:
        checkpoint: Of one checkpoint. Bytes.
        kept: How many checkpoints are kept.
        export: Of the exported model. Bytes.
        none_below: Length of a run up to which it writes no checkpoint. Minutes.
    """

    checkpoint: float
    kept: int
    export: float
    none_below: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> DiskUse:
        """Return that of a run with a model of these sizes."""
        saved = config.checkpoint
        width = bytes_per_value(config)
        moved = sum(trained_parameters(config, shape, role) for role in config.trained)
        exported = shape.parameters + shape.further_parameters + shape.further_copies
        written = bool(saved.every or saved.every_minutes or saved.at_end)
        none_if_short = saved.at_end == "auto" and saved.export and not saved.every
        return cls(
            checkpoint=12.0 * moved,  # in float32: weights and Adam's two moments; others follow from the weights
            kept=saved.keep + (saved.keep_best and config.evaluation is not None) if written else 0,
            export=exported * width if saved.export else 0,
            none_below=saved.every_minutes if none_if_short else 0,
        )

    @property
    def least(self) -> float:
        """What a run takes that writes one checkpoint, or none where it may be too short for one. Bytes."""
        return (self.checkpoint if self.kept and not self.none_below else 0) + self.export

    @property
    def most(self) -> float:
        """What a run takes while it writes a checkpoint; the new one is complete before an old one goes. Bytes."""
        return (self.checkpoint * (self.kept + 1) if self.kept else 0) + self.export

    def __str__(self) -> str:
        """Return it for people."""
        parts = []
        if self.export:
            parts.append(f"exported model {self.export / GIB:.2g} GiB")
        if self.kept:
            long = f", if the run takes more than {self.none_below:g} minutes" if self.none_below else ""
            parts.append(f"{self.kept} checkpoint{'s' * (self.kept != 1)} of {self.checkpoint / GIB:.2g} GiB{long}")
        if not parts:
            return "on disk: no checkpoint, no model"
        return f"on disk: {', '.join(parts)}; at most {self.most / GIB:.2g} GiB at a time"
