"""Rules between sections: each message says why a combination is wrong and what to use instead.

A rule is a generator of violations. All rules run, so that one attempt shows every problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from roll_like.config.plan import RolePlan, overlap, roles
from roll_like.config.rules_algorithm import ALGORITHM_RULES
from roll_like.config.rules_rewards import REWARD_RULES
from roll_like.config.violations import Violation, raise_violations

if TYPE_CHECKING:
    from roll_like.config.rlvr import RLVRConfig


Rule = Callable[["RLVRConfig"], Iterator[Violation]]


def check_rlvr(config: RLVRConfig) -> None:
    """Raise pydantic's ValidationError with every combination of settings that cannot work together."""
    raise_violations("RLVRConfig", (violation for rule in RULES for violation in rule(config)))


def _batches_divide(config: RLVRConfig) -> Iterator[Violation]:
    rollout, updates = config.rollout, config.algorithm.updates_per_step
    if rollout.prompts_per_step % updates:
        near = [n for n in range(1, rollout.prompts_per_step + 1) if rollout.prompts_per_step % n == 0]
        yield Violation(
            ("algorithm", "updates_per_step"),
            f"{rollout.prompts_per_step} prompts cannot be divided into {updates} equal updates; use one of "
            f"{', '.join(map(str, near))}, or change rollout.prompts_per_step",
        )
        return
    samples = rollout.prompts_per_step // updates * rollout.samples_per_prompt
    if samples < config.training.workers:
        yield Violation(
            ("training", "workers"),
            f"one update has {samples} samples, fewer than {config.training.workers} workers, so some would "
            f"have nothing to do; use at most {samples} workers, or more prompts or samples per update",
        )


def _the_policy_gets_its_turn(config: RLVRConfig) -> Iterator[Violation]:
    if config.critic is not None and config.critic.warmup_steps >= config.steps:
        yield Violation(
            ("critic", "warmup_steps"),
            f"the policy does not learn in the first {config.critic.warmup_steps} steps, and the run has "
            f"{config.steps}; set it below steps",
        )


def _lengths_fit(config: RLVRConfig) -> Iterator[Violation]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = prompt + response
    sizes = f"data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} = {longest}"
    budgets = {("training", "max_tokens_per_micro_batch"): config.training.max_tokens_per_micro_batch}
    if config.reference is not None:
        budgets["reference", "max_tokens_per_micro_batch"] = config.reference.max_tokens_per_micro_batch
    if config.critic is not None:
        budgets["critic", "max_tokens_per_micro_batch"] = config.critic.max_tokens_per_micro_batch
    for path, budget in budgets.items():
        if budget < longest:
            yield Violation(
                path, f"{budget} tokens cannot hold one longest sample ({sizes}); set it to {longest} or more"
            )
    window = config.inference.max_model_len if config.inference.type == "vllm" else None
    if window is None:
        return
    if window < longest:
        yield Violation(
            ("inference", "max_model_len"),
            f"{window} tokens cannot hold the longest sample ({sizes}); set it to {longest} or more, or leave it out",
        )
    evaluated = config.evaluation.max_response_tokens if config.evaluation is not None else None
    if evaluated is not None and window < prompt + evaluated:
        yield Violation(
            ("inference", "max_model_len"),
            f"{window} tokens cannot hold the longest evaluated sample (data.max_prompt_tokens + "
            f"evaluation.max_response_tokens = {prompt + evaluated}); set it to that or more, or leave it out",
        )


def _spans_fit(config: RLVRConfig) -> Iterator[Violation]:
    resources = config.resources
    total = resources.nodes * resources.devices_per_node
    if config.critic is None and resources.spans.critic is not None:
        yield Violation(
            ("resources", "spans", "critic"),
            "these devices would stay idle, because there is no `critic` section; remove the span, or add `critic: {}` "
            "and an advantage estimator that learns values",
        )
    for role in roles(config):
        path = role.span_path
        if role.span.stop > total:
            yield Violation(
                path,
                f"{role.span} ends after the last device: nodes × devices_per_node = {resources.nodes} × "
                f"{resources.devices_per_node} = {total}, so devices are 0-{total - 1}",
            )
        else:
            yield from _role_fits(config, role, path)


def _role_fits(config: RLVRConfig, role: RolePlan, path: tuple[str, ...]) -> Iterator[Violation]:
    size, per_node = len(role.span), config.resources.devices_per_node
    if config.resources.device == "cuda" and role.name not in ("inference", "judge") and size != role.workers:
        yield Violation(
            path,
            f"{role.span} has {size} GPUs for {role.workers} {role.name} workers, and each takes exactly one; "
            f"set {role.workers_key}: {size}, or a span of {role.workers}",
        )
        return
    if size % role.workers:
        yield Violation(
            path,
            f"{role.span} has {size} devices, which cannot be divided evenly among {role.workers} "
            f"({role.workers_key}); change either",
        )
        return
    for worker in range(role.workers):
        devices = role.devices_of(worker)
        if devices[0] // per_node != devices[-1] // per_node:
            yield Violation(
                path,
                f"worker {worker} of {role.name} would have devices {devices[0]}-{devices[-1]}, across the border "
                f"between nodes (each has {per_node}); a worker stays within one node: change the span or "
                f"{role.workers_key} so that {per_node} is a multiple of the devices of one worker",
            )
            return


def _spans_are_equal_or_disjoint(config: RLVRConfig) -> Iterator[Violation]:
    planned = roles(config)
    for index, role in enumerate(planned):
        for other in planned[:index]:
            if overlap(role.span, other.span) == "partial":
                yield Violation(
                    role.span_path,
                    f"{role.span} overlaps {other.name}'s {other.span} only in part. Equal spans take turns, disjoint "
                    "spans run side by side; in part, some devices would wait for others. Make them equal or disjoint",
                )


def _device_can_do_it(config: RLVRConfig) -> Iterator[Violation]:
    if config.resources.device == "cuda":
        yield from _gpu_memory_is_shared(config)
    else:
        if config.model.dtype == "float16":
            yield Violation(
                ("model", "dtype"),
                "float16 is slow and overflows on CPU; use bfloat16, or float32 on CPUs without it",
            )
        for section, trained in {"training": config.training, "critic": config.critic}.items():
            if trained is not None and trained.offload != "none":
                yield Violation(
                    (section, "offload"),
                    f"{trained.offload!r} moves states from a GPU to host memory, and resources.device is cpu, "
                    "where they are already; set offload: none",
                )
    if config.resources.nodes > 1 and config.resources.address is None:
        yield Violation(
            ("resources", "address"),
            f"a run on {config.resources.nodes} nodes joins a Ray cluster that is already there; set it to `auto` "
            "(on a node of that cluster) or to host:port",
        )


def _gpu_memory_is_shared(config: RLVRConfig) -> Iterator[Violation]:
    engine, spans = config.inference, config.resources.spans
    if engine.type == "vllm" and spans.training == spans.inference and not engine.sleep:
        share = engine.gpu_memory_utilization
        if share > 0.6:
            yield Violation(
                ("inference", "sleep"),
                f"the engine shares its GPUs with the trainer and would keep {share:.0%} of their memory while it "
                "trains; set sleep: true, gpu_memory_utilization to 0.6 or less, or disjoint spans",
            )


def _evaluation_means_something(config: RLVRConfig) -> Iterator[Violation]:
    evaluation = config.evaluation
    if evaluation is None:
        return
    names = [source.label for source in evaluation.sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Violation(
            ("evaluation", "sources"), f"two evaluation sources are called {name!r}; give each a `name` of its own"
        )
    if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
        yield Violation(
            ("evaluation", "samples_per_prompt"),
            f"at temperature 0 all {evaluation.samples_per_prompt} samples of a prompt are equal; set it to 1, or "
            "evaluation.temperature above 0",
        )
    if not (evaluation.before or evaluation.after or evaluation.every):
        yield Violation(
            ("evaluation",), "it would never run: before and after are false and every is 0; set one, or remove it"
        )


RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    _batches_divide,
    _the_policy_gets_its_turn,
    _lengths_fit,
    _spans_fit,
    _spans_are_equal_or_disjoint,
    _device_can_do_it,
    *REWARD_RULES,
    _evaluation_means_something,
)
