"""Starts the actors of a run out of a configuration: one function a role."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal, TypeVar

from roll_like.builtin.pipelines.online_dpo.config import SampledPromptsConfig
from roll_like.cluster import Cluster, ResourceManager, thread_environment
from roll_like.config.policy_gradient import PolicyGradientConfig
from roll_like.config.sections import DeviceRange, TrainingConfig
from roll_like.inference.interface import EngineSpec
from roll_like.inference.weight_transfer.engines import ActorEngines
from roll_like.inference.weight_transfer.interface import WeightTransfer
from roll_like.inference.weight_transfer.shared_memory_sender import SharedMemoryTransfer
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.inference.weight_transfer.vllm_native import VLLMTransfer
from roll_like.inference.worker import InferenceWorker, engine_environment
from roll_like.models.load import ResolvedModel, resolve_model
from roll_like.models.precision import precision_of
from roll_like.run.launch import RunContext
from roll_like.training.critic import CriticEngine
from roll_like.training.critic_worker import CriticSpec
from roll_like.training.engine import Reference, TrainingEngine, WithoutAdapters
from roll_like.training.language_model import LanguageModelRank
from roll_like.training.start import rank_fields, start_critic_engine, start_trainer
from roll_like.training.worker import TrainerSpec

LanguageModelT = TypeVar("LanguageModelT", bound=LanguageModelRank)


def time_shared(
    config: PolicyGradientConfig, actor: TrainingEngine, critic: CriticEngine | None
) -> list[TrainingEngine | CriticEngine]:
    """Return what is trained on the inference engines' GPUs."""
    device_mapping = config.resources.device_mapping
    shared: list[TrainingEngine | CriticEngine] = [actor] if shares_gpus(config, device_mapping.training) else []
    if critic is not None and shares_gpus(config, device_mapping.critic or device_mapping.training):
        shared.append(critic)
    return shared


def shares_gpus(config: PolicyGradientConfig | SampledPromptsConfig, devices: DeviceRange) -> bool:
    """Return whether a device range's memory has to be given to the inference engines in turn; never on CPU."""
    return config.resources.device != "cpu" and devices.overlaps(config.resources.device_mapping.inference)


def trainer_spec(
    config: PolicyGradientConfig, model: ResolvedModel, training: TrainingConfig, *, frozen: bool
) -> TrainerSpec:
    """Return what the ranks of an actor or of a reference model need to know."""
    learning_steps = config.steps - (0 if config.critic is None else config.critic.warmup_steps)
    return TrainerSpec(
        **rank_fields(
            config,
            model,
            config.resources.device_mapping.training,
            training.workers,
            total_updates=learning_steps * config.algorithm.updates_per_step,
        ),
        training=training,
        frozen=frozen,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
    )


def start_reference(
    config: PolicyGradientConfig, run: RunContext, actor_model: ResolvedModel, actor: TrainingEngine
) -> Reference | None:
    """Start the frozen model that KL terms compare with, where it is not the actor itself; nothing without one."""
    if config.reference is None:
        return None
    if config.reference.mode == "adapter_off":
        return WithoutAdapters(actor)
    path = config.reference.path
    model = actor_model if path is None else resolve_model(config.model.at(path))
    training = config.training.frozen(
        workers=config.reference.workers,
        max_tokens_per_micro_batch=config.reference.max_tokens_per_micro_batch,
    )
    device_mapping = config.resources.device_mapping
    return start_trainer(
        "reference",
        trainer_spec(config, model, training, frozen=True),
        run.resources,
        device_mapping.reference or device_mapping.training,
        max_response_tokens=config.longest_response,
        stack=run.stack,
        timer=run.state.timer,
    )


def start_critic(config: PolicyGradientConfig, run: RunContext, actor_model: ResolvedModel) -> CriticEngine | None:
    """Start the critic, or nothing where there is no `critic` section."""
    critic = config.critic
    if critic is None:
        return None
    model = actor_model if critic.path is None else resolve_model(config.model.at(critic.path))
    devices = config.resources.device_mapping.critic or config.resources.device_mapping.training
    spec = CriticSpec(
        **rank_fields(config, model, devices, critic.workers, total_updates=config.steps * critic.updates_per_step),
        critic=critic,
    )
    return start_critic_engine(spec, run.resources, devices, stack=run.stack, timer=run.state.timer)


def start_inference(
    config: PolicyGradientConfig, model: ResolvedModel, resources: ResourceManager, stack: ExitStack
) -> Cluster[InferenceWorker]:
    """Start the engines' processes; their models are loaded by `InferenceWorker.start`."""
    devices, device = config.resources.device_mapping.inference, config.resources.device
    placements = resources.place(devices, config.inference.replicas, "inference")
    share = len(devices) // config.inference.replicas
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
        weight_transfer=weight_backend(config),
    )
    cluster = Cluster(
        "inference",
        InferenceWorker,
        placements,
        arguments=lambda rank: (config.inference, spec),
        environment=lambda rank: {
            **thread_environment(spec.threads),
            **engine_environment(config.inference, spec.threads, device),
        },
        concurrency=64,
    )
    stack.callback(cluster.close, InferenceWorker.close)
    return cluster


def start_weight_sync(
    config: PolicyGradientConfig, trained: Cluster[LanguageModelT], inference: Cluster[InferenceWorker]
) -> WeightSync:
    """Connect the ranks of the model that is trained with the engines."""
    engines = ActorEngines(inference.handle())
    transfer: WeightTransfer = SharedMemoryTransfer(engines)
    backend = weight_backend(config)
    if backend != "shared_memory":
        address, port = trained.on(0, LanguageModelRank.address)
        share = len(config.resources.device_mapping.inference) // config.inference.replicas
        transfer = VLLMTransfer(client=engines, backend=backend, gpus_per_engine=share, address=address, port=port)
    trained.everywhere(LanguageModelRank.connect_weights, transfer)
    return WeightSync(lambda salt: trained.everywhere(LanguageModelRank.send_weights, salt)[0], engines)


def weight_backend(config: PolicyGradientConfig) -> Literal["shared_memory", "ipc", "nccl"]:
    """Return how weights travel: shared memory on CPU; CUDA IPC between roles that share GPUs; else NCCL."""
    device_mapping = config.resources.device_mapping
    if config.resources.device == "cpu":
        return "shared_memory"
    return "ipc" if device_mapping.training.overlaps(device_mapping.inference) else "nccl"
