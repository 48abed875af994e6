"""From what an engine tells of the tokens that it kept to the `KeptTokens` of a `Generation`."""

from __future__ import annotations

from collections.abc import Sequence

from roll_like.config.sampling import SamplingRunConfig
from roll_like.data.kept import kept_tokens
from roll_like.errors import ConfigError, GenerationError
from roll_like.inference.interface import EngineSpec, GenerateRequest
from roll_like.inference.plugin import EnginePlugin
from roll_like.registry import INFERENCE_ENGINES
from roll_like.types import KeptTokens


def refuse_untold_kept(config: SamplingRunConfig) -> None:
    """Raise a ConfigError where sampling leaves tokens out, and the engine does not tell the trainer which."""
    if not config.replays_kept or config.replay is not None:
        return
    kind = config.inference.type
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(kind)
    obstacle = plugin.kept_obstacle(config.inference, config.unbounded_sampling, device=config.resources.device)
    if obstacle is None:
        return
    rollout = config.rollout
    keys = " and ".join(f"rollout.{key}: {getattr(rollout, key):g}" for key in rollout.truncation)
    whole = ", ".join(f"rollout.{key}: {type(rollout).model_fields[key].default:g}" for key in rollout.truncation)
    missing = ", ".join(f"{key}: {512 if key.endswith('.top_k') else 0}" for key in config.unbounded_sampling)
    raise ConfigError(
        f"{keys} leaves tokens out when answers are sampled, and the trainer has to normalise over those that were "
        "kept: else importance ratios and KL terms compare different distributions, and no weight corrects for tokens "
        f"that are never sampled. inference.type: {kind} does not tell which: {obstacle}",
        fix=f"set {whole}, and for less exploration lower rollout.temperature, which the trainer follows"
        + (f"; or set {missing}" if missing and "top_k" in obstacle else "; or use inference.type: vllm or hf"),
    )


def told_kept(
    found: Sequence[Sequence[int]] | None, request: GenerateRequest, tokens: Sequence[int], spec: EngineSpec
) -> KeptTokens | None:
    """Return what the tokens of a response were drawn from; None where an engine is not to tell.

    Args:
        found: What the engine told; None and nothing for a response without tokens.

    Raises:
        GenerationError: The engine told of other tokens, or contradicts itself.
    """
    if not spec.returns_kept:
        return None
    try:
        return kept_tokens(found or (), tokens)
    except ValueError as error:
        raise GenerationError(
            f"the engine contradicts itself over what request {request.request_id} kept: {error}",
            fix="set rollout.top_p: 1, rollout.top_k: 0 and rollout.min_p: 0",
        ) from error
