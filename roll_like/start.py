"""Starts the actors of a run out of a configuration: one function a role."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal, cast

from roll_like.cluster import Cluster, ResourceManager, thread_environment
from roll_like.config.domains import domain_rewards
from roll_like.config.reward_names import DEFAULT_POOL, JUDGE_URLS_VARIABLE
from roll_like.config.rlvr import RewardPoolConfig, RewardsConfig, RLVRConfig
from roll_like.config.sections import ModelConfig, TrainingConfig
from roll_like.inference.base import EngineSpec
from roll_like.inference.server import ServerWorker
from roll_like.inference.vllm_environment import vllm_environment
from roll_like.inference.worker import InferenceWorker, engine_environment
from roll_like.models.load import ResolvedModel, resolve_model
from roll_like.rewards.base import RewardConfig
from roll_like.rewards.scorer import reward_name
from roll_like.rewards.worker import RewardWorker, notebook_rewards
from roll_like.rollout.handles import RewardPool
from roll_like.rollout.reward_pools import RewardPools, RewardShare
from roll_like.run import RunContext
from roll_like.training.critic import CriticEngine
from roll_like.training.critic_worker import CriticSpec
from roll_like.training.engine import TrainingEngine
from roll_like.training.start import start_critic_engine, start_trainer
from roll_like.training.worker import DeepSpeedWorker, TrainerSpec
from roll_like.weights.engines import ActorEngines
from roll_like.weights.gpu import VLLMTransfer
from roll_like.weights.shared_memory import SharedMemoryTransfer
from roll_like.weights.sync import WeightSync
from roll_like.weights.transfer import WeightTransfer

#: Added to the rewards' own limits before their worker is taken for dead: it has to start first. Seconds.
REWARD_GRACE = 60.0


def time_shared(
    config: RLVRConfig, actor: TrainingEngine, critic: CriticEngine | None
) -> list[TrainingEngine | CriticEngine]:
    """Return what is trained on the inference engines' GPUs; on CPU memory is not moved, so nothing."""
    if config.resources.device == "cpu":
        return []
    spans = config.resources.spans
    shared: list[TrainingEngine | CriticEngine] = [actor] if spans.training.overlaps(spans.inference) else []
    if critic is not None and (spans.critic or spans.training).overlaps(spans.inference):
        shared.append(critic)
    return shared


def trainer_spec(config: RLVRConfig, model: ResolvedModel, training: TrainingConfig, *, frozen: bool) -> TrainerSpec:
    """Return what the ranks of an actor or of a reference model need to know."""
    span = config.resources.spans.training
    learning_steps = config.steps - (0 if config.critic is None else config.critic.warmup_steps)
    return TrainerSpec(
        model_path=str(model.path),
        dtype=config.model.dtype,
        device=config.resources.device,
        threads=len(span) // training.workers,
        seed=config.seed,
        training=training,
        frozen=frozen,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        total_updates=learning_steps * config.algorithm.updates_per_step,
        trust_remote_code=config.model.trust_remote_code,
        imports=config.import_,
    )


def start_reference(config: RLVRConfig, run: RunContext, actor_model: ResolvedModel) -> TrainingEngine | None:
    """Start the frozen model that KL terms compare with, or nothing where there is none."""
    if config.reference is None:
        return None
    path = config.reference.path
    model = actor_model if path is None else resolve_model(config.model.model_copy(update={"path": path}))
    training = TrainingConfig(
        workers=config.reference.workers,
        max_tokens_per_micro_batch=config.reference.max_tokens_per_micro_batch,
        share_prompts=config.training.share_prompts,
        logprob_chunk_tokens=config.training.logprob_chunk_tokens,
        logprob_chunk_vocab=config.training.logprob_chunk_vocab,
    )
    spans = config.resources.spans
    return start_trainer(
        "reference",
        trainer_spec(config, model, training, frozen=True),
        run.resources,
        spans.reference or spans.training,
        max_response_tokens=config.rollout.max_response_tokens,
        stack=run.stack,
        span_timer=run.state.timer,
    )


def start_critic(config: RLVRConfig, run: RunContext, actor_model: ResolvedModel) -> CriticEngine | None:
    """Start the critic, or nothing where there is no `critic` section."""
    critic = config.critic
    if critic is None:
        return None
    model = actor_model if critic.path is None else resolve_model(config.model.model_copy(update={"path": critic.path}))
    span = config.resources.spans.critic or config.resources.spans.training
    spec = CriticSpec(
        model_path=str(model.path),
        dtype=config.model.dtype,
        device=config.resources.device,
        threads=len(span) // critic.workers,
        seed=config.seed,
        total_updates=config.steps * critic.updates_per_step,
        trust_remote_code=config.model.trust_remote_code,
        imports=config.import_,
        critic=critic,
    )
    return start_critic_engine(spec, run.resources, span, stack=run.stack, span_timer=run.state.timer)


def start_inference(
    config: RLVRConfig, model: ResolvedModel, resources: ResourceManager, stack: ExitStack
) -> Cluster[InferenceWorker]:
    """Start the engines' processes; their models are loaded by `InferenceWorker.start`."""
    span, device = config.resources.spans.inference, config.resources.device
    placements = resources.place(span, config.inference.replicas, "inference")
    share = len(span) // config.inference.replicas
    spec = EngineSpec(
        model_path=str(model.path),
        tokenizer_path=str(model.tokenizer_path),
        dtype=config.model.dtype,
        device=device,
        threads=share if device == "cpu" else 1,
        tensor_parallel_size=1 if device == "cpu" else share,
        max_model_len=context_window(config),
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


def start_weight_sync(config: RLVRConfig, actor: TrainingEngine, inference: Cluster[InferenceWorker]) -> WeightSync:
    """Connect the actor's ranks with the engines."""
    engines = ActorEngines(inference.handle())
    transfer: WeightTransfer = SharedMemoryTransfer(engines)
    backend = weight_backend(config)
    if backend != "shared_memory":
        address, port = actor.cluster.on(0, DeepSpeedWorker.address)
        share = len(config.resources.spans.inference) // config.inference.replicas
        transfer = VLLMTransfer(client=engines, backend=backend, gpus_per_engine=share, address=address, port=port)
    actor.cluster.everywhere(DeepSpeedWorker.connect_weights, transfer)
    return WeightSync(lambda salt: actor.cluster.everywhere(DeepSpeedWorker.send_weights, salt)[0], engines)


def context_window(config: RLVRConfig) -> int:
    """Return the engines' window: the longest prompt and the longest response together. Tokens."""
    responses = [config.rollout.max_response_tokens]
    if config.evaluation is not None and config.evaluation.max_response_tokens is not None:
        responses.append(config.evaluation.max_response_tokens)
    needed = config.data.max_prompt_tokens + max(responses)
    return getattr(config.inference, "max_model_len", None) or needed


def weight_backend(config: RLVRConfig) -> Literal["shared_memory", "ipc", "nccl"]:
    """Return how weights travel: shared memory on CPU; CUDA IPC between roles that share GPUs; else NCCL."""
    spans = config.resources.spans
    if config.resources.device == "cpu":
        return "shared_memory"
    return "ipc" if spans.training.overlaps(spans.inference) else "nccl"


def start_judge(config: RLVRConfig, resources: ResourceManager, stack: ExitStack) -> Cluster[ServerWorker] | None:
    """Start the judge's processes, or nothing where there is none; their models are loaded by `ServerWorker.start`."""
    judge = config.judge
    if judge is None:
        return None
    model = resolve_model(ModelConfig(path=judge.path, dtype=judge.dtype, cache_dir=config.model.cache_dir))
    span, device = config.resources.spans.judge or config.resources.spans.inference, config.resources.device
    share = len(span) // judge.replicas
    spec = EngineSpec(
        model_path=str(model.path),
        tokenizer_path=str(model.tokenizer_path),
        dtype=judge.dtype,
        device=device,
        threads=share if device == "cpu" else 1,
        tensor_parallel_size=1 if device == "cpu" else share,
        max_model_len=judge.max_model_len,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        weight_transfer=weight_backend(config),
    )
    cluster = Cluster(
        "judge",
        ServerWorker,
        resources.place(span, judge.replicas, "judge"),
        arguments=lambda rank: (judge, spec, config.resources.start_timeout_seconds),
        environment=lambda rank: {
            **thread_environment(spec.threads),
            **vllm_environment(judge, spec.threads, device),
        },
    )
    stack.callback(cluster.close, ServerWorker.close)
    return cluster


def start_rewards(
    config: RLVRConfig, resources: ResourceManager, stack: ExitStack, judge: Cluster[ServerWorker] | None
) -> RewardPools:
    """Start the pools of reward workers: those of `rewards.pools`, and one for all other rewards."""
    urls = [] if judge is None else judge.everywhere(ServerWorker.url)
    use = cast(Sequence[RewardConfig], config.rewards.use)
    pooled = {name for pool in config.rewards.pools.values() for name in pool.rewards}
    others = tuple(reward_name(reward) for reward in use if reward_name(reward) not in pooled)
    pools = dict(config.rewards.pools)
    if others:
        pools[DEFAULT_POOL] = RewardPoolConfig(rewards=others, workers=config.rewards.workers)
    shares = []
    for name, pool in pools.items():
        chosen = tuple(reward for reward in use if reward_name(reward) in pool.rewards)
        section = config.rewards.model_copy(update={"use": chosen})
        shares.append(RewardShare(chosen, _start_pool(config, name, pool, section, urls, resources, stack)))
    return RewardPools(shares, domain_rewards(config))


def _start_pool(
    config: RLVRConfig,
    name: str,
    pool: RewardPoolConfig,
    section: RewardsConfig,
    judge_urls: Sequence[str],
    resources: ResourceManager,
    stack: ExitStack,
) -> RewardPool:
    """Start one pool's workers; without devices of their own they have one thread each."""
    plugins = notebook_rewards(cast(Sequence[RewardConfig], section.use))
    if pool.span is None:
        placements, threads = resources.beside(pool.workers), 1
    else:
        placements = resources.place(pool.span, pool.workers, f"rewards {name}")
        threads = len(pool.span) // pool.workers
    hidden = {} if pool.span is not None and config.resources.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    cluster = Cluster(
        name,
        RewardWorker,
        placements,
        arguments=lambda rank: (section, config.import_, plugins, domain_rewards(config)),
        environment=lambda rank: {
            **thread_environment(threads),
            **hidden,
            **({JUDGE_URLS_VARIABLE: ",".join(judge_urls)} if judge_urls else {}),
        },
        concurrency=section.groups_per_worker + 4,  # room to ask how it is, and to close it
    )
    stack.callback(cluster.close, RewardWorker.close)
    return RewardPool(
        cluster,
        limit_seconds=REWARD_GRACE + section.timeout_seconds * (section.retries + 1),
        groups_per_worker=section.groups_per_worker,
    )
