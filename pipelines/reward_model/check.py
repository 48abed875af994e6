"""The model that a reward model starts from."""

from __future__ import annotations

from roll_like.check.findings import Finding, failed
from roll_like.check.hub import localised
from roll_like.config.run import RunConfig
from roll_like.errors import RollLikeError
from roll_like.models.classifier import check_outputs
from roll_like.models.load import resolve_model
from roll_like.models.shape import ModelShape


def check_score(config: RunConfig, shape: ModelShape | None) -> list[Finding]:
    """Return what is wrong with the model that a reward model starts from; nothing where it is out of reach."""
    model = localised(config.model, "model.path", []) if shape is not None else None
    if model is None:
        return []
    try:
        check_outputs(resolve_model(model).path, trust_remote_code=model.trust_remote_code)
    except RollLikeError as error:
        return [failed("model.path", error)]
    return []
