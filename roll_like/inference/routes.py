"""From what an engine tells of the experts of a sample to the routes of a `Generation`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from roll_like.config.algorithm import ROUTER_REPLAY
from roll_like.config.sampling import SamplingRunConfig
from roll_like.data.routes import known_routes
from roll_like.errors import ConfigError, GenerationError
from roll_like.inference.interface import EngineSpec, GenerateRequest
from roll_like.inference.plugin import EnginePlugin
from roll_like.models.modules import load_model_config
from roll_like.models.shape import Experts
from roll_like.registry import INFERENCE_ENGINES
from roll_like.types import RouteArray, StopReason


def refuse_unknown_routes(config: SamplingRunConfig, model: Path) -> None:
    """Raise a ConfigError where routes are to be replayed, and the model has none, or the engine does not tell them."""
    if not config.replays_routes:
        return
    loaded = load_model_config(model, trust_remote_code=config.model.trust_remote_code)
    if Experts.of(loaded.get_text_config()) is None:
        raise ConfigError(
            f"{ROUTER_REPLAY}: the model {config.model.path} is no mixture of experts", fix="remove the key"
        )
    kind = config.inference.type
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(kind)
    obstacle = plugin.routes_obstacle(config.inference, device=config.resources.device)
    if obstacle is not None and config.replay is None:
        raise ConfigError(
            f"{ROUTER_REPLAY}: inference.type: {kind} cannot tell which experts a token was computed with: {obstacle}",
            fix=f"set inference.type: hf, or {ROUTER_REPLAY}: false",
        )


def experts_of(spec: EngineSpec) -> Experts | None:
    """Return the sizes of the mixture whose routes an engine is to tell; None where it is not to.

    Raises:
        GenerationError: The model is none.
    """
    if not spec.returns_routes:
        return None
    config = load_model_config(Path(spec.model_path), trust_remote_code=spec.trust_remote_code)
    experts = Experts.of(config.get_text_config())
    if experts is None:
        raise GenerationError(f"{ROUTER_REPLAY}: the model {spec.model_path} has no experts", fix="remove the key")
    return experts


def told_routes(
    found: npt.NDArray[Any] | None, request: GenerateRequest, response: int, stop: StopReason, experts: Experts | None
) -> RouteArray | None:
    """Return the routes of a sample, shape [P+R, layers, k].

    Args:
        found: What the engine told, shape [at least P+R−1, layers, k]: its last token is not computed.
        response: R.
        stop: Why it ended. An aborted sample may have no routes; it is not trained on.
        experts: What `experts_of` returned.

    Raises:
        GenerationError: The engine told the experts of too few tokens.
    """
    tokens = len(request.prompt_ids) + response
    if experts is None or (stop is StopReason.ABORTED and (found is None or len(found) < tokens - 1)):
        return None
    if found is None or len(found) < tokens - 1:
        told = "no experts" if found is None else f"the experts of {len(found)} tokens"
        raise GenerationError(
            f"the engine told {told} for request {request.request_id}; {tokens - 1} tokens were computed for it",
            fix=f"set {ROUTER_REPLAY}: false",
        )
    return known_routes(found[: tokens - 1], experts.choice, tokens)
