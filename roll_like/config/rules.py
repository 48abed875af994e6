"""Rules between sections: each message says why a combination is wrong and what to use instead.

A rule is a generator of violations. All rules run, so that one attempt shows every problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.config.base import Violation
from roll_like.config.evaluation import ScheduleConfig
from roll_like.config.inference import DEFAULT_ENGINE, WEIGHT_TRANSPORTS, weight_backend
from roll_like.config.resources import RolePlan
from roll_like.config.rules_algorithm import ALGORITHM_RULES
from roll_like.config.rules_effect import EFFECT_RULES, POLICY_EFFECT_RULES, oversampling_replaces_something
from roll_like.config.rules_schedule import SCHEDULE_RULES
from roll_like.config.run import RunConfig
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig
from roll_like.config.training import TrainerConfig
from roll_like.registry import TRAINING_BACKENDS


def _batches_divide(config: PolicyGradientConfig) -> Iterator[Violation]:
    rollout, updates = config.rollout, config.algorithm.updates_per_step
    if rollout.groups % updates:
        near = [n for n in range(1, rollout.groups + 1) if rollout.groups % n == 0]
        yield Violation(
            ("algorithm", "updates_per_step"),
            f"{rollout.groups} {rollout.groups_key.removesuffix('_per_step')} cannot be divided into {updates} equal "
            f"updates; use one of {', '.join(map(str, near))}, or change rollout.{rollout.groups_key}",
        )
        return
    samples = rollout.groups // updates * rollout.samples_per_group
    groups = rollout.groups_key.removesuffix("_per_step")
    yield from ranks_have_work(config.training, samples, "update", "samples", f"more {groups} or samples per update")


def ranks_have_work(training: TrainerConfig, count: int, of: str, what: str, more: str) -> Iterator[Violation]:
    """Yield more ranks than there are rows to compute.

    Args:
        training: The section of the model.
        count: Samples, pairs or tokens that ranks divide among themselves.
        of: What they are of: a step or an update.
        what: What they are.
        more: What would give every rank something to do.
    """
    sharing, workers = training.sequence_parallel, training.workers
    if count < workers // sharing:
        computing = f"{workers} workers" if sharing == 1 else f"{workers // sharing} times {sharing} workers"
        yield Violation(
            ("training", "workers"),
            f"one {of} has {count} {what}, fewer than {computing}, so some would have nothing to do; use at most "
            f"{count * sharing} workers, or {more}",
        )


def _the_policy_gets_its_turn(config: PolicyGradientConfig) -> Iterator[Violation]:
    if config.critic is not None and config.critic.warmup_steps >= config.steps:
        yield Violation(
            ("critic", "warmup_steps"),
            f"the policy does not learn in the first {config.critic.warmup_steps} steps, and the run has "
            f"{config.steps}; set it below steps",
        )


def _budget_holds(config: RunConfig, section: str, budget: int, sharing: int = 1) -> Iterator[Violation]:
    """Yield a token budget of a micro-batch that is less than one sample.

    Args:
        config: The run's configuration.
        section: The model's section.
        budget: Of one rank, in tokens.
        sharing: Ranks that compute a row together.
    """
    longest, sizes = config.longest_sample, config.longest_sample_terms
    if budget * sharing < longest:
        found = f"{budget} tokens" + ("" if sharing == 1 else f" on each of {sharing} ranks")
        yield Violation(
            (section, "max_tokens_per_micro_batch"),
            f"{found} cannot hold one longest sample ({sizes}); set it to {-(-longest // sharing)} or more",
        )


def budget_holds_a_sample(config: RunConfig) -> Iterator[Violation]:
    """Yield a budget of the trainer's micro-batches that is less than one sample."""
    training = config.training
    yield from _budget_holds(config, "training", training.max_tokens_per_micro_batch, training.sequence_parallel)


def budget_holds_a_pair(config: RunConfig) -> Iterator[Violation]:
    """Yield a budget of micro-batches that two of the longest samples do not fit into."""
    sharing = config.training.sequence_parallel
    budget, needed = config.training.max_tokens_per_micro_batch, 2 * config.longest_sample
    if budget * sharing < needed:
        found = f"{budget} tokens" + ("" if sharing == 1 else f" on each of {sharing} ranks")
        yield Violation(
            ("training", "max_tokens_per_micro_batch"),
            f"{found} cannot hold the two answers of one pair: 2 × {config.longest_sample} = {needed} "
            f"({config.longest_sample_terms}); set it to {-(-needed // sharing)} or more",
        )


def _micro_batches_hold_a_sample(config: PolicyGradientConfig) -> Iterator[Violation]:
    for name, section in config.trained.items():
        yield from _budget_holds(config, name, section.max_tokens_per_micro_batch, section.sequence_parallel)
    if config.reference is not None and config.reference.mode == "cluster":
        yield from _budget_holds(config, "reference", config.reference.max_tokens_per_micro_batch)


def _window_fits(config: SamplingRunConfig) -> Iterator[Violation]:
    if config.replay is not None:
        return
    window = config.inference.max_model_len
    needed = {"sample": (config.longest_sample, config.longest_sample_terms)}
    if config.longest_evaluated is not None:
        needed["evaluated sample"] = config.longest_evaluated
    for what, (longest, sizes) in needed.items():
        if window is not None and window < longest:
            yield Violation(
                ("inference", "max_model_len"),
                f"{window} tokens cannot hold the longest {what} ({sizes}); set it to {longest} or more, or leave it "
                "out",
            )


def _no_device_mapping_without_a_critic(config: PolicyGradientConfig) -> Iterator[Violation]:
    if config.critic is None and config.resources.device_mapping.critic is not None:
        yield Violation(
            ("resources", "device_mapping", "critic"),
            "these devices would stay idle, because there is no `critic` section; remove the key, or add `critic: {}` "
            "and an advantage estimator that learns values",
        )


def _device_ranges_fit(config: RunConfig) -> Iterator[Violation]:
    resources = config.resources
    total = resources.nodes * resources.devices_per_node
    for role in config.roles:
        path = role.devices_key
        if role.devices.stop > total:
            yield Violation(
                path,
                f"{role.devices} ends after the last device: nodes × devices_per_node = {resources.nodes} × "
                f"{resources.devices_per_node} = {total}, so devices are 0-{total - 1}",
            )
        else:
            yield from _role_fits(config, role, path)


def _role_fits(config: RunConfig, role: RolePlan, path: tuple[str, ...]) -> Iterator[Violation]:
    size, per_node = len(role.devices), config.resources.devices_per_node
    if config.resources.device == "cuda" and role.name not in ("inference", "judge") and size != role.workers:
        yield Violation(
            path,
            f"{role.devices} has {size} GPUs for {role.workers} {role.name} workers, and each takes exactly one; "
            f"set {role.workers_key}: {size}, or a device range of {role.workers}",
        )
        return
    if size % role.workers:
        yield Violation(
            path,
            f"{role.devices} has {size} devices, which cannot be divided evenly among {role.workers} "
            f"({role.workers_key}); change either",
        )
        return
    for worker in range(role.workers):
        devices = role.devices_of(worker)
        if devices[0] // per_node != devices[-1] // per_node:
            yield Violation(
                path,
                f"worker {worker} of {role.name} would have devices {devices[0]}-{devices[-1]}, across the border "
                f"between nodes (each has {per_node}); a worker stays within one node: change the device range or "
                f"{role.workers_key} so that {per_node} is a multiple of the devices of one worker",
            )
            return


def _device_ranges_are_equal_or_disjoint(config: RunConfig) -> Iterator[Violation]:
    planned = config.roles
    for index, role in enumerate(planned):
        for other in planned[:index]:
            if role.devices != other.devices and role.devices.overlaps(other.devices):
                yield Violation(
                    role.devices_key,
                    f"{role.devices} overlaps {other.name}'s {other.devices} only in part. Equal ranges take turns, "
                    "disjoint ranges run side by side; in part, some devices would wait for others. Make them equal or "
                    "disjoint",
                )


def _device_can_do_it(config: RunConfig) -> Iterator[Violation]:
    if config.resources.device == "cpu" and config.model.dtype == "float16":
        yield Violation(
            ("model", "dtype"), "float16 is slow and overflows on CPU; use bfloat16, or float32 on CPUs without it"
        )
    if config.resources.nodes > 1 and config.resources.address is None:
        yield Violation(
            ("resources", "address"),
            f"a run on {config.resources.nodes} nodes joins a Ray cluster that is already there; set it to `auto` "
            "(on a node of that cluster) or to host:port",
        )
    for section, trained in config.trained.items():
        if config.resources.device == "cpu" and trained.offload != "none":
            yield Violation(
                (section, "offload"),
                f"{trained.offload!r} moves states from a GPU to host memory, and resources.device is cpu, "
                "where they are already; set offload: none",
            )
        if config.resources.device == "cpu" and trained.attention == "flex":
            yield Violation(
                (section, "attention"),
                "'flex' has a backward pass on GPUs only, and resources.device is cpu; use varlen, or dense",
            )


def _ranks_share_rows(config: RunConfig) -> Iterator[Violation]:
    for section, trained in config.trained.items():
        sharing, workers = trained.sequence_parallel, trained.workers
        if workers % sharing:
            yield Violation(
                (section, "sequence_parallel"),
                f"{workers} workers cannot be divided into groups of {sharing} that share rows; set {section}.workers "
                f"to a multiple of {sharing}",
            )
        if sharing > 1 and trained.attention == "dense":
            yield Violation(
                (section, "attention"),
                f"'dense' computes whole rows with masks, and sequence_parallel: {sharing} divides rows; use varlen, "
                "or leave it out",
            )


def _ranks_divide_experts(config: RunConfig) -> Iterator[Violation]:
    for section, trained in config.trained.items():
        ranks, workers = trained.expert_parallel, trained.workers
        if ranks > 1 and not TRAINING_BACKENDS.get(trained.backend).divides_experts:
            able = [name for name in sorted(TRAINING_BACKENDS.names()) if TRAINING_BACKENDS.get(name).divides_experts]
            yield Violation(
                (section, "expert_parallel"),
                f"{trained.backend} divides no experts among ranks; set {section}.backend: {' or '.join(able)}, or "
                "remove the key: zero_stage 3 shards experts like other weights",
            )
        elif workers % ranks:
            yield Violation(
                (section, "expert_parallel"),
                f"{workers} workers cannot be divided into groups of {ranks} that divide experts; set "
                f"{section}.workers to a multiple of {ranks}",
            )


def _backend_takes_its_settings(config: RunConfig) -> Iterator[Violation]:
    for section, trained in config.trained.items():
        backend = TRAINING_BACKENDS.get(trained.backend)
        for violation in backend.violations(trained):
            yield Violation((section, *violation.path), violation.message)
        quantization = None if trained.lora is None else trained.lora.quantization
        if quantization is not None and "weights" in backend.divided(trained):
            yield Violation(
                (section, "lora", "quantization"),
                f"{quantization!r} keeps 4-bit weights whole on each rank, and {section}.zero_stage: "
                f"{trained.zero_stage} of {trained.backend!r} shards weights; use {section}.backend: deepspeed with "
                "zero_stage 2 or less, or remove the key",
            )


def _engine_fits(config: SamplingRunConfig) -> Iterator[Violation]:
    if config.replay is not None:
        return
    engine, resources = config.inference, config.resources
    per_engine = len(resources.device_mapping.inference) // engine.replicas
    if resources.device == "cuda" and per_engine > 1 and not engine.capabilities.tensor_parallel:
        yield Violation(
            ("inference", "replicas"),
            f"the engine {engine.type!r} cannot divide a model among GPUs, and each replica would have {per_engine}; "
            f"set it to {len(resources.device_mapping.inference)}, or use inference.type: {DEFAULT_ENGINE}",
        )
    if weight_backend(engine, resources) is None:
        here = [transport.name for transport in WEIGHT_TRANSPORTS if transport.works(resources)]
        taken = sorted(transport.name for transport in engine.capabilities.weight_transports)
        yield Violation(
            ("inference", "type"),
            f"weights would travel to the engines by {' or '.join(here)} here, and the engine "
            f"{engine.type!r} takes them by {', '.join(taken)}; use "
            f"inference.type: {DEFAULT_ENGINE}, or one node",
        )
    if not engine.capabilities.prompt_logprobs:
        for key in ("probe_every", "probe_tolerance"):
            if getattr(engine, key) != type(engine).model_fields[key].default:
                yield Violation(
                    ("inference", key),
                    f"the engine {engine.type!r} does not tell the log-probabilities of given tokens, so nothing is "
                    f"probed and this has no effect; remove it, or use inference.type: {DEFAULT_ENGINE}",
                )
    if engine.sends_adapters and config.training.lora is None:
        yield Violation(
            ("inference", "lora"),
            "true sends adapters, and the trainer has none; add `training.lora: {}`, or remove the key",
        )
    elif engine.sends_adapters and not config.may_send_adapters:
        yield Violation(
            ("inference", "lora"),
            "true sends adapters alone, to engines that load the base unquantised, and the trainer computes with it in "
            "4 bits (training.lora.quantization), so log-probabilities would differ; set it to false, which sends the "
            "dequantised base with adapters merged, or remove the key",
        )
    yield from _base_is_beside(config)
    yield from engine.violations(resources)


def _base_is_beside(config: SamplingRunConfig) -> Iterator[Violation]:
    """Yield what asks for the base model or its adapters where engines have merged weights only."""
    for key in config.adapter_keys:
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        if config.training.lora is None:
            yield Violation(
                path,
                "engines have the base model beside the policy only where adapters are trained; add "
                "`training.lora: {}`, or change this (`roll-like eval --model` measures other models)",
            )
        elif not config.may_send_adapters:
            way_out = "use inference.type: vllm without `lora: false`"
            if config.training.lora.quantization is not None:
                way_out = "remove training.lora.quantization"
            yield Violation(
                path,
                "adapters are merged into the weights of these engines, which have no base model then; "
                f"{way_out}, or change this",
            )


def _replay_has_no_engines(config: SamplingRunConfig) -> Iterator[Violation]:
    if config.replay is not None and config.evaluation is not None:
        yield Violation(
            ("evaluation",),
            "an evaluation samples with inference engines, and a replay starts none; set evaluation: null, or "
            "rollout.schedule: {type: sync}",
        )


def _evaluation_means_something(config: SamplingRunConfig) -> Iterator[Violation]:
    evaluation = config.evaluation
    if evaluation is None:
        return
    count, key = evaluation.samples_per_group, evaluation.samples_key
    if evaluation.temperature == 0 and count > 1:
        yield Violation(
            ("evaluation", key),
            f"at temperature 0 all {count} samples of a group are equal; set it to 1, or evaluation.temperature "
            "above 0",
        )


def _evaluation_runs(config: RunConfig) -> Iterator[Violation]:
    for section in ("evaluation", "pair_evaluation"):
        schedule: ScheduleConfig | None = getattr(config, section, None)
        if schedule is not None and not (schedule.before or schedule.after or schedule.every):
            yield Violation(
                (section,), "it would never run: before and after are false and every is 0; set one, or remove it"
            )


def _streams_are_for_training(config: RunConfig) -> Iterator[Violation]:
    """What is read as steps need it has no end: neither a pass over it nor an evaluation on all of it is possible."""
    for name in type(config).model_fields:
        sources = getattr(getattr(config, name), "sources", None)
        for index, source in enumerate(sources if isinstance(sources, tuple) else ()):
            if not getattr(source, "streaming", False):
                continue
            if name != "data":
                yield Violation(
                    (name, "sources", index, "streaming"),
                    "an evaluation measures all rows; remove it, and take a part of the rows where they are many "
                    "(`split: test[:1000]` of a hub dataset)",
                )
            elif getattr(config, "epochs", None) is not None:
                yield Violation(
                    ("epochs",),
                    f"data.sources.{index} is read as steps need it, and how many rows it has is not known; set "
                    "`steps`, and epochs: null",
                )


#: What holds for every run.
RUN_RULES = (
    _streams_are_for_training,
    _device_ranges_fit,
    _device_ranges_are_equal_or_disjoint,
    _device_can_do_it,
    _ranks_share_rows,
    _ranks_divide_experts,
    _backend_takes_its_settings,
    _evaluation_runs,
    *EFFECT_RULES,
)

#: What holds for every run whose policy samples, however it is trained.
SAMPLING_RULES = (
    _window_fits,
    *RUN_RULES,
    _engine_fits,
    _replay_has_no_engines,
    _evaluation_means_something,
    oversampling_replaces_something,
)

#: What holds for every run that trains a policy on groups of its samples.
POLICY_GRADIENT_RULES = (
    *ALGORITHM_RULES,
    _batches_divide,
    _the_policy_gets_its_turn,
    _micro_batches_hold_a_sample,
    _no_device_mapping_without_a_critic,
    *SAMPLING_RULES,
    *POLICY_EFFECT_RULES,
    *SCHEDULE_RULES,
)
