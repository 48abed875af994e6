"""Model, tokenizer, reference model and critic: whether they are there and suit the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.check.findings import Finding, failed
from roll_like.check.hub import localised
from roll_like.check.plan import DRAFT, GIB, bytes_per_value
from roll_like.config.algorithm import ROUTER_REPLAY
from roll_like.config.model import ModelConfig
from roll_like.config.run import RunConfig
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig
from roll_like.config.training import JOINING, ReferenceSection
from roll_like.errors import ConfigError, RollLikeError
from roll_like.inference.adapters import adapter_choice
from roll_like.inference.kept import refuse_untold_kept
from roll_like.inference.plugin import ADAPTERS_KEY, DRAFT_KEY, SPECULATIVE_KEY, EnginePlugin, refuse_unserved_images
from roll_like.inference.routes import refuse_unknown_routes
from roll_like.models.attention import AttentionLayers, refuse_undivided_heads
from roll_like.models.load import MODEL, TOKENIZER, cached_copy, load_tokenizer, resolve_model
from roll_like.models.lora import adapted_width, quantized_width
from roll_like.models.modules import empty_model, load_model_config
from roll_like.models.quantized import require_bitsandbytes
from roll_like.models.shape import ModelShape, load_model_shape
from roll_like.models.stored import refuse_quantized
from roll_like.models.suited import refuse_unsuited
from roll_like.models.vision import ImageProcessor, image_processor, is_vision_model, refuse_vision
from roll_like.registry import INFERENCE_ENGINES, TRAINING_BACKENDS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

TEMPLATE = "model.chat_template"


def check_model(config: RunConfig, findings: list[Finding]) -> tuple[ModelConfig | None, ModelShape | None]:
    """Return the model with a local path and its sizes, or None with findings that say why not."""
    model = localised(config.model, MODEL, findings)
    if model is None:  # its config.json may be in the cache without weights
        directory = cached_copy(config.model).path
        return None, None if directory is None else _shape_without_weights(config, directory, findings)
    try:
        # the tokenizer is a finding of its own
        resolved = resolve_model(model.model_copy(update={"tokenizer": None}))
        shape = load_model_shape(resolved.path)
        _refuse_unsuited(config, resolved.path, scores=config.task != "text-generation")
    except RollLikeError as error:
        findings.append(failed(MODEL, error))
        return None, _shape_without_weights(config, Path(os.path.expanduser(model.path)), findings)
    findings += layers_fit(config, resolved.path)
    return model.at(str(resolved.path)), _with_adapters(config, resolved.path, shape, findings)


def _refuse_unsuited(config: RunConfig, path: Path, *, scores: bool = False) -> None:
    """Raise a ConfigError where a directory holds no model that trainers load; of one that scores, the head is new."""
    refuse_unsuited(path, trust_remote_code=config.model.trust_remote_code, whole=not scores)


def _shape_without_weights(config: RunConfig, directory: Path, findings: list[Finding]) -> ModelShape | None:
    """Return the sizes that a directory's config.json states, for the plan."""
    try:
        shape = load_model_shape(directory, weights=False)
        refuse_quantized(directory, {})
    except ConfigError as error:
        if (directory / "config.json").is_file() and not any(each.key == MODEL for each in findings):
            findings.append(failed(MODEL, error))
        return None
    return _with_adapters(config, directory, shape, findings)


def layers_fit(config: RunConfig, path: Path) -> Iterator[Finding]:
    """Yield layers that rows of several samples are not for, or that the engine computes in another way."""
    try:
        model = load_model_config(path, trust_remote_code=config.model.trust_remote_code)
        yield from _engine_computes_as_training(config, model)
        layers = AttentionLayers.of(model)
        layers.refuse_sharing(config.row_sharing)
        for key, section in config.trained.items():
            if getattr(section, "path", None) is not None:
                continue  # a critic that starts from another model
            refuse_vision(model, section, key)
            if not getattr(section, "freeze_vision", True) and not is_vision_model(path):
                yield Finding.warning(
                    f"{key}.freeze_vision",
                    f"has no effect: {config.model.path} is a text model, without a vision tower; remove the key",
                )
            TRAINING_BACKENDS.get(section.backend).refuse_model(model, section)
            if section.attention in JOINING:
                layers.refuse_joining(section.attention)
            if section.sequence_parallel > 1:
                layers.refuse_joining("varlen", automatic=True)
                refuse_undivided_heads(model, section.sequence_parallel)
    except ConfigError as error:
        yield failed("model.path", error)


def _engine_computes_as_training(config: RunConfig, whole: PretrainedConfig) -> Iterator[Finding]:
    """Yield samples that are too long for an engine whose layers would see other tokens than the trainer's."""
    if not isinstance(config, SamplingRunConfig) or config.replay is not None:
        return
    model: Any = whole.get_text_config()
    window, longest = getattr(model, "sliding_window", None), config.longest_sample
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(config.inference.type)
    # of compressed keys (kv_lora_rank) the engine makes heads of another width
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    if not getattr(model, "kv_lora_rank", None):
        obstacle = plugin.heads_obstacle(width, device=config.resources.device)
        if obstacle is not None:
            yield Finding.error(
                "inference.type",
                f"{obstacle}, and the model's have {width}; use another engine (inference.type: hf), or a GPU",
            )
    if AttentionLayers.of(model).recurrent:
        dtype, device = config.model.dtype, config.resources.device
        yield from plugin.states_findings(config.inference, whole, dtype=dtype, device=device)
    obstacle = plugin.length_obstacle(str(model.model_type), window, longest)
    if obstacle is not None:
        yield Finding.error(
            "inference.type",
            f"{obstacle}, and samples of {longest} tokens ({config.longest_sample_terms}) are longer than the window "
            f"of {window}; lower them, or use another engine (inference.type)",
        )


def _with_adapters(config: RunConfig, path: Path, shape: ModelShape, findings: list[Finding]) -> ModelShape:
    """Return the sizes with those of the adapters, if there are some; layers that the model lacks are findings."""
    for role, section in config.trained.items():
        if getattr(section, "path", None) is None:  # not a critic that starts from another model
            shape = _with_adapters_of(config, role, path, shape, findings)
    return shape


def _with_adapters_of(
    config: RunConfig, role: str, path: Path, shape: ModelShape, findings: list[Finding]
) -> ModelShape:
    """Return the sizes of a role's model with those of its adapters."""
    lora, trusted = config.trained[role].lora, config.model.trust_remote_code
    if lora is None:
        return shape
    try:
        model = load_model_config(path, trust_remote_code=trusted)
    except ConfigError:
        return shape  # a finding already
    try:
        empty = empty_model(model, trusted)
        width = adapted_width(empty, lora, role)
    except ConfigError as error:
        findings.append(failed(f"{role}.lora.target_modules", error))
        return shape
    except (OSError, ValueError, KeyError) as error:
        findings.append(Finding.error("model.path", f"transformers cannot make such a model: {error}"))
        return shape
    quantized = 0
    try:
        if lora.quantization is not None:
            require_bitsandbytes(role)
            quantized = quantized_width(empty, lora, role)
    except ConfigError as error:
        findings.append(failed(f"{role}.lora.quantization", error))
    if role == "training":
        return replace(shape, adapted_width=width, quantized_parameters=quantized)
    return replace(shape, critic_adapted_width=width, critic_quantized_parameters=quantized)


def check_tokenizer(
    config: RunConfig, model: ModelConfig | None, findings: list[Finding]
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer with its chat template, or None with findings that say why not."""
    template = config.model.chat_template
    if template is not None and not template.expanduser().is_file():
        where = template.expanduser().absolute()
        message = f"there is no file {where}; correct the path, or remove the key to use the tokenizer's own"
        findings.append(Finding.error(TEMPLATE, message))
        return None
    named = config.model.tokenizer
    if named is not None:
        section = ModelConfig(path=named, cache_dir=config.model.cache_dir)
        local = localised(section, TOKENIZER, findings)
        # a tokenizer of its own is all that is loaded, so the model may be out of reach
        base = model or config.model
        model = base.model_copy(update={"tokenizer": local.path}) if local is not None else None
    if model is None:
        return None
    try:
        return load_tokenizer(model)
    except RollLikeError as error:
        key = TOKENIZER if named else MODEL
        findings.append(failed(TEMPLATE if error.message.startswith(TEMPLATE) else key, error))
        return None


def check_images(config: RunConfig, model: ModelConfig | None, findings: list[Finding]) -> ImageProcessor | None:
    """Return what counts the tokens of images; None where the model or the pipeline takes none."""
    if model is None or not config.takes_images:
        return None
    try:
        path = resolve_model(model.model_copy(update={"tokenizer": None})).path
        processor = image_processor(path)
    except RollLikeError as error:
        findings.append(failed("model.path", error))
        return None
    if isinstance(config, SamplingRunConfig):
        try:
            refuse_unserved_images(config.inference.type, path, here=config.resources.device == "cpu")
        except ConfigError as error:
            findings.append(failed("inference.type", error))
    return processor


def check_window(config: RunConfig, shape: ModelShape | None, key: str) -> Iterator[Finding]:
    """Yield sequences that are longer than the model allows.

    Args:
        shape: The model's sizes, where they are known.
    """
    if shape is None or shape.max_positions is None or config.context_window <= shape.max_positions:
        return
    longest, terms, given = config.longest_sample, config.longest_sample_terms, None
    if isinstance(config, SamplingRunConfig):
        given = config.inference.max_model_len
        longest, terms = max((longest, terms), config.longest_evaluated or (0, ""))
    keys = " or ".join(terms.partition(" = ")[0].split(" + "))
    if given is not None:
        terms = f"inference.max_model_len; {terms}"
        keys = "inference.max_model_len" if longest <= shape.max_positions else f"{keys}, and inference.max_model_len"
    yield Finding.error(
        key,
        f"{config.context_window} tokens ({terms}) exceed max_position_embeddings ({shape.max_positions}); "
        f"lower {keys}",
    )


def check_engines(config: SamplingRunConfig, shape: ModelShape | None) -> Iterator[Finding]:
    """Yield divisions that the model does not allow, and settings that are not for it."""
    if config.replay is not None:
        return
    engines = config.roles[1].devices_per_worker
    if shape is not None and config.resources.device == "cuda" and shape.heads % engines:
        yield Finding.error(
            "inference.replicas",
            f"each engine would divide {shape.heads} attention heads among {engines} GPUs; use more replicas, or a "
            f"device range that leaves each a divisor of {shape.heads}",
        )
    if shape is not None:
        for violation in config.inference.model_violations(experts=shape.experts > 0):
            yield Finding.error(".".join(map(str, violation.path)), violation.message)
        yield from _small_cache(config, shape)


def _small_cache(config: SamplingRunConfig, shape: ModelShape) -> Iterator[Finding]:
    """Yield a cache of a configured size that has no room for one sequence; an engine does not start with that."""
    cache = config.inference.kv_cache_bytes(config.resources.device)
    needed = config.context_window * shape.kv_bytes_per_token(bytes_per_value(config))
    if cache is not None and cache < needed:
        yield Finding(
            # windows, states and caches in fewer bits take less than is counted here
            "warning" if shape.masks > 1 or shape.masked or getattr(config.inference, "engine_args", None) else "error",
            f"inference.{config.inference.memory_key}",
            f"one sequence of {config.context_window} tokens needs {needed / GIB:.2g} GiB of key-value cache, and this "
            f"is {cache / GIB:.2g} GiB; raise it: engines decode up to {config.inference.max_running} sequences at a "
            "time (inference.max_running)",
        )


def check_adapters(config: SamplingRunConfig, model: ModelConfig | None) -> Iterator[Finding]:
    """Yield whether engines are sent adapters alone, in runs that train some.

    Args:
        model: The model with a local path; None where there is none.
    """
    if model is None:
        return
    try:
        choice = adapter_choice(config, Path(model.path))
    except ConfigError as error:
        if not error.message.startswith("training.lora"):  # a finding of the model's
            named = error.message.partition(": ")[0]
            yield failed(named if named.startswith(config.adapter_keys or ADAPTERS_KEY) else ADAPTERS_KEY, error)
        return
    if choice.adapter is not None:
        yield Finding.note(ADAPTERS_KEY, "adapters alone are sent to the engines")
        for key in config.inference.changed("full_sync_every") + ["weight_sync"] * (
            config.inference.weight_sync == "delta"
        ):
            yield Finding.error(
                f"inference.{key}",
                "adapters are sent alone, and always whole, so this has no effect; remove it, or set "
                f"{ADAPTERS_KEY}: false, which sends whole weights",
            )
    elif choice.reason and config.inference.sends_adapters is None:
        yield Finding.note(ADAPTERS_KEY, f"whole weights with merged adapters are sent: {choice.reason}")


def check_routes(config: SamplingRunConfig, model: ModelConfig | None) -> Iterator[Finding]:
    """Yield what keeps routes from being replayed in runs that ask for it.

    Args:
        model: The model with a local path; None where there is none.
    """
    if model is None:
        return
    try:
        refuse_unknown_routes(config, Path(model.path))
    except ConfigError as error:
        yield failed(ROUTER_REPLAY, error)


def check_kept(config: SamplingRunConfig) -> Iterator[Finding]:
    """Yield what keeps the trainer from normalising over the tokens that sampling kept, in runs that leave some out."""
    try:
        refuse_untold_kept(config)
    except ConfigError as error:
        yield failed(f"rollout.{config.rollout.truncation[0]}", error)


def _further_model(config: RunConfig, role: str, path: str, findings: list[Finding]) -> ModelShape | None:
    """Return the sizes of a role's own model, or None with findings that say why not."""
    key = f"{role}.path"
    model = localised(config.model.at(path).model_copy(update={"tokenizer": None}), key, findings)
    if model is None:
        return None
    try:
        local = resolve_model(model, key=key).path
        shape = load_model_shape(local)
        _refuse_unsuited(config, local)
    except RollLikeError as error:
        findings.append(failed(key, error))
        return None
    return _with_adapters_of(config, role, local, shape, findings) if role in config.trained else shape


def role_shapes(config: RunConfig, shape: ModelShape | None) -> dict[str, ModelShape]:
    """Return the sizes of each role's model, where they are known; `shape` is that of the trained one."""
    if shape is None:
        return {}
    shapes = {"training": shape, "inference": shape}
    for name, section in {"critic": getattr(config, "critic", None), **config.frozen}.items():
        if section is None:
            continue
        path = getattr(section, "path", None)
        own = shape if path is None else _further_model(config, name, path, [])
        if own is not None:
            shapes[name] = own
    if not isinstance(config, SamplingRunConfig):
        return shapes
    if config.inference.guesses_by_itself and shape.further_layers:
        shapes[DRAFT] = replace(shape, layers=shape.further_layers, parameters=shape.further_parameters)
    draft = config.inference.draft_model
    if draft is not None:
        with suppress(ConfigError):  # the plan of GPUs says that it is left out, that of CPUs shows no such part
            shapes[DRAFT] = load_model_shape(Path(draft))
    return shapes


def check_draft(config: RunConfig, model: ModelConfig | None, shapes: Mapping[str, ModelShape]) -> Iterator[Finding]:
    """Yield that nothing can guess tokens: layers that are not there, or a model of another vocabulary.

    Args:
        model: The model with a local path; None where there is none.
        shapes: All sizes (`role_shapes`).
    """
    if isinstance(config, SamplingRunConfig) and config.inference.guesses_by_itself and model is not None:
        yield from _check_own_guesses(config, model, shapes)
    if DRAFT in shapes and shapes[DRAFT].vocab_size != shapes["inference"].vocab_size:
        yield Finding.error(
            DRAFT_KEY,
            f"its vocabulary has {shapes[DRAFT].vocab_size} entries and the policy's {shapes['inference'].vocab_size}, "
            "so the policy cannot check its guesses; use a model of the same family whose embedding is as large, or "
            "method: ngram",
        )


def _check_own_guesses(
    config: SamplingRunConfig, model: ModelConfig, shapes: Mapping[str, ModelShape]
) -> Iterator[Finding]:
    """Yield that the model has no layers that predict further tokens, or that the engine has none for it."""
    key, way_out = f"{SPECULATIVE_KEY}.method", f"use method: ngram, or remove {SPECULATIVE_KEY}"
    if not shapes["inference"].further_layers:
        yield Finding.error(
            key,
            f"mtp guesses with layers of the model that predict further tokens, and the files in {model.path} hold "
            f"none (names with mtp, or with eh_proj); {way_out}",
        )
        return
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(config.inference.type)
    obstacle = plugin.further_layers_obstacle(Path(model.path))
    if obstacle is not None:
        yield Finding.error(key, f"{obstacle}; {way_out}")


def check_reference(config: RunConfig, reference: ReferenceSection | None, shape: ModelShape | None) -> list[Finding]:
    """Return what is wrong with a reference model that is not the trained one."""
    findings: list[Finding] = []
    if reference is None or reference.path is None:
        return findings
    theirs = _further_model(config, "reference", reference.path, findings)
    if theirs is not None and shape is not None and theirs.vocab_size != shape.vocab_size:
        message = (
            f"its vocabulary has {theirs.vocab_size} entries and the policy's {shape.vocab_size}, so their "
            "log-probabilities cannot be compared; use a model of the same family, or leave the key out"
        )
        findings.append(Finding.error("reference.path", message))
    return findings


def check_critic(config: PolicyGradientConfig, shape: ModelShape | None) -> list[Finding]:
    """Return what is wrong with a critic that starts from a model of its own."""
    findings: list[Finding] = []
    if config.critic is None or config.critic.path is None:
        return findings
    theirs = _further_model(config, "critic", config.critic.path, findings)
    if theirs is None:
        return findings
    if shape is not None and theirs.vocab_size < shape.vocab_size:
        message = (
            f"its vocabulary has {theirs.vocab_size} entries and the policy's {shape.vocab_size}, so it cannot read "
            "all of the policy's tokens; use a model of the same family, or leave the key out"
        )
        findings.append(Finding.error("critic.path", message))
    return [*findings, *samples_fit(config, theirs, "critic.path")]


def samples_fit(config: RunConfig, shape: ModelShape, key: str) -> Iterator[Finding]:
    """Yield samples that are longer than a model beside the trained one allows; `key` names it: `critic.path`."""
    longest = config.longest_sample
    if shape.max_positions is not None and longest > shape.max_positions:
        yield Finding.error(
            key,
            f"samples of {longest} tokens exceed this model's max_position_embeddings ({shape.max_positions}); use "
            f"another model, or lower {config.longest_sample_terms}",
        )
