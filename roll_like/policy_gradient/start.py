"""Starts the actors of a run out of a configuration: one function a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from roll_like.algorithms.kl import KLController
from roll_like.cluster import Cluster, ResourceManager, thread_environment
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.inference import engines_share_gpus, weight_backend
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig
from roll_like.inference.adapters import adapter_choice
from roll_like.inference.interface import EngineSpec, InferenceEngine
from roll_like.inference.kept import refuse_untold_kept
from roll_like.inference.plugin import EnginePlugin, refuse_unserved_images
from roll_like.inference.routes import refuse_unknown_routes
from roll_like.inference.weight_transfer.interface import SendReport, all_sent
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.metrics.trackers import shows_systems
from roll_like.models.load import ResolvedModel, load_renderer, resolve_model
from roll_like.models.precision import precision_of
from roll_like.policy_gradient.critic import Critic, ValueObjective
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.objective import PolicyObjective, SFTWeight
from roll_like.policy_gradient.probe import weight_probe
from roll_like.registry import INFERENCE_ENGINES
from roll_like.rollout.engine_pool import EnginePool
from roll_like.run.state import RunContext
from roll_like.training.engine import PolicyCopy, Reference, TrainingEngine, WithoutAdapters
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.rank import TrainingRank
from roll_like.training.start import rank_spec, start_engine
from roll_like.types import PolicySample


def policy_settings(config: PolicyGradientConfig, kl: KLController) -> dict[str, Any]:
    """Return the arguments of a `PolicyObjective`; `kl` sets the weight of a KL penalty in its loss."""
    given = config.given_answers
    return {
        "demonstrations": given,
        "sft": None if given is None or given.sft is None else SFTWeight(given.sft),
        "settings": config.training,
        "temperature": config.rollout.temperature,
        "algorithm": config.algorithm,
        "max_response_tokens": config.longest_response,
        "kl": kl,
        "replays_routes": config.algorithm.router_replay,
    }


def start_actor(
    config: PolicyGradientConfig,
    run: RunContext,
    model: ResolvedModel,
    objective: PolicyObjective,
    gpu_sharing: GPUSharing,
) -> TrainingEngine[Sequence[PolicySample]]:
    """Start the policy that is trained."""
    devices = config.resources.devices_of("training")
    learning_steps = config.steps - (0 if config.critic is None else config.critic.warmup_steps)
    updates = learning_steps * config.algorithm.updates_per_step
    spec = rank_spec(config, model, devices, objective, total_updates=updates, copies=config.copies)
    engine = start_engine("training", spec, run.resources, devices, stack=run.stack, timer=run.state.timer)
    gpu_sharing.add(engine, devices)
    return engine


def start_reference(
    config: PolicyGradientConfig,
    run: RunContext,
    actor_model: ResolvedModel,
    actor: TrainingEngine[Any],
    copies: Mapping[str, PolicyCopy],
    gpu_sharing: GPUSharing,
) -> Reference[PolicySample] | None:
    """Start the frozen model that KL terms compare with, where it is not the actor itself; nothing without one."""
    if config.reference is None:
        return None
    if config.reference.mode == "adapter_off":
        return WithoutAdapters(actor)
    if config.reference.mode == "copy":
        return copies["reference"]
    path = config.reference.path
    model = actor_model if path is None else resolve_model(config.model.at(path))
    training = config.training.frozen(
        workers=config.reference.workers,
        max_tokens_per_micro_batch=config.reference.max_tokens_per_micro_batch,
    )
    devices = config.resources.devices_of("reference")
    # of another model the layers have other experts
    replays = config.algorithm.router_replay and path is None
    objective = LanguageModelObjective[Any, Any](
        settings=training, temperature=config.rollout.temperature, replays_routes=replays
    )
    spec = rank_spec(config, model, devices, objective, total_updates=None)
    engine = start_engine("reference", spec, run.resources, devices, stack=run.stack, timer=run.state.timer)
    gpu_sharing.add(engine, devices)
    return engine


def start_critic(
    config: PolicyGradientConfig, run: RunContext, actor_model: ResolvedModel, gpu_sharing: GPUSharing
) -> Critic | None:
    """Start the critic, or nothing where there is no `critic` section."""
    critic = config.critic
    if critic is None:
        return None
    model = actor_model if critic.path is None else resolve_model(config.model.at(critic.path))
    devices = config.resources.devices_of("critic")
    objective = ValueObjective(settings=critic)
    spec = rank_spec(config, model, devices, objective, total_updates=config.steps * critic.updates_per_step)
    engine = start_engine("critic", spec, run.resources, devices, stack=run.stack, timer=run.state.timer)
    gpu_sharing.add(engine, devices)
    return Critic(engine)


def start_inference(
    config: SamplingRunConfig,
    model: ResolvedModel,
    resources: ResourceManager,
    stack: ExitStack,
    runner: DriverLoop,
    *,
    follows: bool = True,
    adapters: int = 0,
    watched: bool = False,
) -> EnginePool:
    """Start the engines' processes; their models are loaded by `InferenceEngine.start`.

    Args:
        resources: Where the workers go.
        stack: Ends them when it is closed.
        follows: Whether a trainer sends them weights.
        adapters: How many adapters they hold at a time beside the policy's, where they are sent adapters alone.
        watched: Whether `EnginePool.metrics` is shown to the run's trackers; else engines need not count.

    Raises:
        ConfigError: The engine cannot serve a vision-language model, or tell the routes or the kept
            tokens that training needs.
    """
    refuse_unserved_images(config.inference.type, model.path)
    refuse_unknown_routes(config, model.path)
    if follows:  # without a trainer, nobody needs them
        refuse_untold_kept(config)
    devices, device = config.resources.devices_of("inference"), config.resources.device
    placements = resources.place(devices, config.inference.replicas, "inference")
    share = len(devices) // config.inference.replicas
    adapter = adapter_choice(config, model.path).adapter if follows else None
    renderer = load_renderer(config.model)
    spec = EngineSpec(
        model_path=str(model.path),
        tokenizer_path=str(model.tokenizer_path),
        dtype=precision_of(config),
        device=device,
        threads=share if device == "cpu" else 1,
        tensor_parallel_size=1 if device == "cpu" else share,
        max_model_len=config.context_window,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        weight_backend=_weight_backend(config, adapters=adapter is not None),
        shares_gpus=engines_share_gpus(config.resources),
        adapter=None if adapter is None else replace(adapter, named=adapters),
        returns_routes=config.replays_routes,
        returns_kept=follows and config.replays_kept,
        float32_head=config.model.head_dtype == "float32",
        returns_metrics=watched and shows_systems(config.metrics),
        stop_ids=tuple(sorted(renderer.stop_ids)),
        kept_tokens=renderer.kept_tokens,
    )
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(config.inference.type)
    cluster = Cluster(
        "inference",
        plugin.engine(),
        placements,
        arguments=lambda rank: (config.inference, spec),
        environment=lambda rank: {**thread_environment(spec.threads), **plugin.environment(config.inference, spec)},
        concurrency=64,
    )
    stack.callback(cluster.close, InferenceEngine.close)
    return EnginePool(cluster, runner, report=resources.report, follows=follows, takes_adapters=adapter is not None)


class _Sender:
    """Lets every rank of a model send its weights; connects them anew where ranks or engines were replaced."""

    def __init__(self, config: SamplingRunConfig, trained: TrainingEngine[Any], inference: EnginePool) -> None:
        self._config = config
        self._trained = trained
        self._inference = inference
        self._connected: tuple[object, ...] = ()

    def connect(self) -> None:
        """Connect the ranks with the engines that are there, unless they are."""
        wanted = (self._trained.restarts, self._inference.membership)
        if self._connected == wanted:
            return
        from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer

        config, ranks = self._config, self._trained.cluster
        plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(config.inference.type)
        transfer = plugin.weight_transfer(
            _weight_backend(config, adapters=self._inference.takes_adapters),
            self._inference.engines(),
            len(config.resources.devices_of("inference")) // config.inference.replicas,
            lambda: ranks.on(0, TrainingRank.address),
        )
        if isinstance(transfer, SharedMemoryTransfer) and not self._inference.takes_adapters:
            settings = config.inference
            transfer = replace(
                transfer,
                sync=settings.weight_sync,
                full_every=settings.full_sync_every,
                int8=settings.quantizes == "int8",
            )
        with self._trained.resident("weights"):
            ranks.everywhere(TrainingRank.connect_weights, transfer, self._inference.takes_adapters)
        self._connected = wanted

    def __call__(self, seed: int) -> SendReport:
        """Send; return what ranks say together."""
        self.connect()
        return all_sent(self._trained.cluster.everywhere(TrainingRank.send_weights, seed))


def start_weight_sync(
    config: SamplingRunConfig, trained: TrainingEngine[Any], inference: EnginePool, *, version: int = 0
) -> WeightSync:
    """Connect the ranks of the model that is trained with the engines.

    Args:
        version: Number of the last version that the run had before it was resumed; the first push makes it one more.
    """
    sender = _Sender(config, trained, inference)
    sender.connect()
    return WeightSync(sender, inference, version=version, probe=weight_probe(config, trained.cluster))


def _weight_backend(config: SamplingRunConfig, *, adapters: bool) -> str:
    backend = weight_backend(config.inference, config.resources, adapters=adapters)
    assert backend is not None, "a rule of the configuration says so"
    return backend
