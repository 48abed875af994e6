"""The process's environment, engine arguments, disk, cores and memory, and settings that may not be meant."""

from __future__ import annotations

import codecs
import locale
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from roll_like.algorithms.advantages.returns import GAE, length_adaptive_lam
from roll_like.check.disk import DiskUse
from roll_like.check.findings import Finding, failed
from roll_like.check.plan import GIB, Plan, bytes_per_value
from roll_like.cluster.limits import usable_cores, usable_memory
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.inference import DEFAULT_ENGINE, engines_share_gpus
from roll_like.config.rollout import AsyncSchedule, ReplaySchedule
from roll_like.config.run import RunConfig
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig
from roll_like.config.training import CriticConfig, OptimizerConfig, TrainerConfig
from roll_like.errors import ConfigError
from roll_like.inference.plugin import SEEDS_KEY, EnginePlugin
from roll_like.metrics.trackers import TraceTracker
from roll_like.models.precision import bfloat16_speed, slow_bfloat16
from roll_like.registry import INFERENCE_ENGINES, LOSSES, TRACKERS
from roll_like.rollout.replay import require_recorded
from roll_like.training.rows import MAX_SHARED_ROW_TOKENS

#: A learning rate above this is no rate of any language model.
MOST_LR = 0.1
#: Rates of Muon: above the first none is meant for AdamW's scale, below the second none for the original one.
MOST_MATCHED_LR, LEAST_ORIGINAL_LR = 0.01, 1e-4
#: With a λ below this at the longest response, an advantage is little more than the critic's next value minus this one.
LEAST_LAM = 0.9
#: A temperature above this makes tokens nearly equally likely.
MOST_TEMPERATURE = 5.0


def check_environment() -> Iterator[Finding]:
    """Yield the variables that keep a run from working, or that it does not heed."""
    if codecs.lookup(encoding := locale.getpreferredencoding(False)).name != "utf-8":
        yield Finding.error(
            "PYTHONUTF8",
            f"this Python reads and writes text as {encoding}, which the locale (LC_ALL, "
            "LANG) says; start it with PYTHONUTF8=1",
        )
    if sys.flags.optimize > 1:
        yield Finding.error(
            "PYTHONOPTIMIZE",
            f"found {sys.flags.optimize}: Python drops docstrings, which transformers reads; unset it, or set it to 1",
        )
    home = os.environ.get("HOME")
    try:
        folder = Path.home()
    except RuntimeError:  # the user has no entry in /etc/passwd
        yield Finding.error("HOME", "not set, and this user has no home folder; set it to a folder: caches go there")
    else:
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            found = f"{folder} cannot be written to" if home is None else f"found {home}, which cannot be written to"
            yield Finding.error("HOME", f"{found}; set it to a folder: caches of models and libraries go there")
    launched = os.environ.get("WORLD_SIZE", "1")
    if "LOCAL_RANK" in os.environ and launched not in ("", "0", "1"):
        yield Finding.error(
            "WORLD_SIZE",
            f"a launcher (torchrun, deepspeed, accelerate) has started this process as one of {launched}, and each "
            "would be a run of its own: a run starts its workers itself. Start it once, without a launcher; "
            "resources.nodes and devices_per_node say how much it uses",
        )
    if (address := os.environ.get("RAY_ADDRESS")) is not None:
        yield Finding.warning(
            "resources.address",
            f"RAY_ADDRESS is {address}, and a run heeds resources.address only; it starts a Ray of its own. Set "
            "resources.address: auto to join that cluster",
        )


def check_engine(config: SamplingRunConfig) -> Iterator[Finding]:
    """Yield what the engine itself finds wrong with its settings, and GPU memory that it never frees."""
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(config.inference.type)
    yield from plugin.check(config.inference, config.resources)
    if engines_share_gpus(config.resources) and not config.inference.capabilities.sleep:
        yield Finding.warning(
            "inference.type",
            f"the engine {config.inference.type!r} keeps its GPU memory while the trainer works on the same GPUs; "
            f"both must fit at a time, or use inference.type: {DEFAULT_ENGINE} or disjoint device ranges",
        )


def check_replay(config: SamplingRunConfig, replay: ReplaySchedule) -> Iterator[Finding]:
    """Yield steps whose rollouts were not recorded."""
    try:
        require_recorded(replay.path, config.steps)
    except ConfigError as error:
        yield failed("rollout.schedule.path", error)


def check_output(config: RunConfig, use: DiskUse | None) -> Iterator[Finding]:
    """Yield what keeps the run from writing its folder: no directory, no permission, no space."""
    folder = (config.runs_dir / config.name).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is not a directory" if not there.is_dir() else "may not be written to"
        yield Finding.error("output_dir", f"{there} {what}; set output_dir to a folder that can be written to")
        return
    if use is None:
        return
    free = shutil.disk_usage(there).free
    if free < use.most:
        yield Finding(
            "error" if free < use.least else "warning",
            "output_dir",
            f"{there} has {free / GIB:.1f} GiB free; a checkpoint takes about {use.checkpoint / GIB:.1f} GiB, and the "
            f"run up to {use.most / GIB:.1f} GiB with checkpoint.keep: {config.checkpoint.keep}; free some, or set "
            "output_dir to a larger disk",
        )


def check_hardware(config: RunConfig, made: Plan) -> Iterator[Finding]:
    """Yield what this machine does not have; what the run takes elsewhere is a note."""
    resources = config.resources
    if resources.device == "cuda" or resources.address is not None:
        count = f"{resources.nodes} × {resources.devices_per_node}"
        yield Finding.note("resources", f"the {count} devices are as stated; they are counted when the run starts")
        return
    cores = usable_cores()
    if resources.devices_per_node > cores:
        yield Finding.warning(
            "resources.devices_per_node",
            f"{resources.devices_per_node} cores are configured and a run here may use {cores}; set devices_per_node: "
            f"{cores} and a device_mapping to match",
        )
    if config.model.dtype == "bfloat16" and slow_bfloat16():
        yield Finding.warning(
            "model.dtype",
            f"bfloat16 measured {bfloat16_speed():.2g} times as fast as float32 on this CPU; use auto, or float32",
        )
    workers = {role.name: role.workers for role in made.roles}
    needed = sum(line.total * workers[line.role] for line in made.memory)
    memory = usable_memory()
    if needed > memory:
        sampler = f"inference.{config.inference.memory_key}" if isinstance(config, SamplingRunConfig) else None
        yield Finding.warning(
            "resources",
            f"all workers together take about {needed / GIB:.1f} GiB, and a run here may use {memory / GIB:.1f} GiB; "
            f"{'' if sampler is None else f'lower {sampler}, '}raise training.zero_stage, or use a smaller model",
        )


def check_settings(config: SamplingRunConfig, made: Plan) -> Iterator[Finding]:
    """Yield settings that are valid and may not be meant."""
    if not isinstance(config, PolicyGradientConfig):
        yield from warm_up_that_never_ends("training", config.training, made.updates)
        return
    sat_out = 0
    if config.critic is not None:
        sat_out = min(config.critic.warmup_steps, config.steps) * config.algorithm.updates_per_step
        updates = config.steps * config.critic.updates_per_step
        yield from warm_up_that_never_ends("critic", config.critic, updates)
        yield from value_clip_without_effect(config.critic)
    yield from warm_up_that_never_ends("training", config.training, made.updates - sat_out)
    yield from ratio_settings_without_effect(config.algorithm)
    yield from lam_of_short_responses(config)
    yield from doubtful_staleness(config)


def _doubtful_muon(section: str, optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Yield a rate of matrices that is meant for the other scale."""
    muon = optimizer.muon
    if muon is None:
        return
    rate = muon.lr or optimizer.lr
    if muon.adjust_lr_fn == "match_rms_adamw" and muon.lr is not None and rate > MOST_MATCHED_LR:
        yield Finding.warning(
            f"{section}.optimizer.muon.lr",
            f"found {rate:g}: with adjust_lr_fn: match_rms_adamw a matrix moves about as far as AdamW moves it with "
            "this rate, and 1e-7 to 1e-4 is usual; rates near 0.02 are meant for adjust_lr_fn: original",
        )
    if muon.adjust_lr_fn == "original" and rate < LEAST_ORIGINAL_LR:
        yield Finding.warning(
            f"{section}.optimizer.muon.lr",
            f"found {rate:g}{'' if muon.lr else ', which is optimizer.lr'}: with adjust_lr_fn: original a weight moves "
            "by about rate / √width, so that matrices hardly learn; raise it, or set adjust_lr_fn: match_rms_adamw",
        )


def doubtful_rates(config: RunConfig, made: Plan) -> Iterator[Finding]:
    """Yield learning rates and temperatures that destroy a model, and evaluations that never come."""
    for section, trained in config.trained.items():
        if trained.optimizer.lr > MOST_LR:
            yield Finding.warning(
                f"{section}.optimizer.lr",
                f"found {trained.optimizer.lr:g}: Adam moves each weight by up to this much in each update; full "
                "models are trained with 1e-7 to 1e-4, adapters with up to 1e-3",
            )
        yield from _doubtful_muon(section, trained.optimizer)
    for section in ("rollout", "evaluation"):
        temperature = getattr(getattr(config, section, None), "temperature", 1.0)
        if temperature > MOST_TEMPERATURE:
            yield Finding.warning(
                f"{section}.temperature",
                f"found {temperature:g}: tokens are drawn almost at random; 0.6 to 1.2 is usual",
            )
    schedule, steps = config.evaluation, made.steps  # 0 where `epochs` of data that cannot be read here decide
    if schedule is not None and 0 < steps < schedule.every:
        yield Finding.warning(
            "evaluation.every",
            f"the run has {steps} steps, fewer than {schedule.every}: there are evaluations before and after it only; "
            "lower it to see how the model changes meanwhile",
        )


def long_masks(config: RunConfig) -> Iterator[Finding]:
    """Yield samples so long that their attention mask is large, where another attention needs none."""
    longest, auto_is_dense = config.longest_sample, config.resources.device == "cpu" or bytes_per_value(config) == 4
    for section, trained in config.trained.items():
        masked = trained.attention == "dense" or (trained.attention == "auto" and auto_is_dense)
        if masked and trained.sequence_parallel == 1 and longest > MAX_SHARED_ROW_TOKENS:
            other = "varlen" if auto_is_dense else "auto"
            yield Finding.warning(
                f"{section}.attention",
                f"{trained.attention} is dense here, with a mask of L × L bytes a row: {longest**2 / GIB:.2f} GiB for "
                f"a sample of {longest} tokens; {other} makes none, where the model allows it (docs/architecture.md)",
            )


#: What a note ends with that a user who changed nothing reads.
_FINE = "these are defaults, and nothing needs to be changed"


def ratio_settings_without_effect(algorithm: AlgorithmConfig) -> Iterator[Finding]:
    """Yield settings that act through a ratio that is always 1: a warning where they were changed, else a note."""
    if algorithm.updates_per_step > 1 or algorithm.old_logprobs == "behaviour":
        return
    loss, default = algorithm.loss, type(algorithm.loss)(type=algorithm.loss.type)
    values = {name: getattr(loss, name) for name in LOSSES.get(loss.type).ratio_settings}
    idle = [name for name, value in values.items() if value is not None and value is not False]
    if not idle:
        return
    changed = [name for name in idle if values[name] != getattr(default, name)]
    yield Finding(
        "warning" if changed else "note",
        f"algorithm.loss.{(changed or idle)[0]}",
        "with one update a step the old policy is the current one and every ratio is 1, so "
        f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect; "
        + ("set algorithm.updates_per_step to 2 or more, or old_logprobs: behaviour" if changed else _FINE),
    )


def doubtful_staleness(config: PolicyGradientConfig) -> Iterator[Finding]:
    """Yield what an asynchronous run may suffer from, and how many updates its oldest samples lag behind."""
    schedule, updates = config.rollout.schedule, config.algorithm.updates_per_step
    if not isinstance(schedule, AsyncSchedule):
        return
    bound, key = schedule.max_staleness, "rollout.schedule.max_staleness"
    lag = bound * updates + updates - 1
    yield Finding.note(
        key,
        f"the oldest tokens that are trained on lag {lag} optimizer updates behind: {bound} versions of {updates} each"
        + (f", and the {updates - 1} before the last of the step" if updates > 1 else ""),
    )
    if bound > 4:
        yield Finding.warning(key, f"{bound} versions: samples this old slow learning down; 1 to 4 are usual")
    elif bound > 1 and config.critic is not None:
        yield Finding.warning(
            key,
            f"the critic's values are those of the current policy, and returns those of one up to {bound} versions "
            "older; set it to 1, or use an advantage estimator without a critic",
        )
    correction = config.algorithm.correction
    if bound > 2 and correction.reject is None and config.algorithm.old_logprobs != "behaviour":
        yield Finding.warning(
            "algorithm.correction.reject",
            f"with samples up to {bound} versions old, leave out what the policy has moved away from: set "
            "reject: {high: 2}, or algorithm.old_logprobs: behaviour",
        )


def value_clip_without_effect(critic: CriticConfig) -> Iterator[Finding]:
    """Yield a bound on the change of values that have not changed: a warning where it was changed, else a note."""
    if critic.value_clip is None or critic.updates_per_step > 1:
        return
    yield Finding(
        "note" if critic.value_clip == CriticConfig().value_clip else "warning",
        "critic.value_clip",
        "with one critic update a step every value is still the one before the step, so value_clip has no effect; set "
        "critic.updates_per_step to 2 or more, or value_clip: null",
    )


def lam_of_short_responses(config: PolicyGradientConfig) -> Iterator[Finding]:
    """Yield a `length_adaptive` that is made for longer responses, whose rewards hardly reach the tokens before."""
    advantage = config.algorithm.advantage
    if not isinstance(advantage, GAE.Config) or advantage.length_adaptive is None:
        return
    alpha, longest = advantage.length_adaptive, config.longest_response
    most = length_adaptive_lam(longest, alpha)
    if most >= LEAST_LAM:
        return
    enough = max(1.0, math.ceil(100 / longest) / 10)  # 1 − 1/(α·n) is 0.9 with α = 10/n
    yield Finding.warning(
        "algorithm.advantage.length_adaptive",
        f"with {alpha:g} λ is 0 for responses of up to {int(1 / alpha)} tokens and {most:.2g} for the longest "
        f"({longest}): the policy learns what the critic says of the next token, hardly the reward. VAPO's 0.05 is for "
        f"thousands of tokens; for these responses set {enough:.1f} or more (λ = "
        f"{length_adaptive_lam(longest, enough):.2g} for the longest)",
    )


def sleep_without_effect(config: RunConfig) -> Iterator[Finding]:
    """Yield a `sleep` that was set although nothing would move."""
    devices = {role.name: role.devices for role in config.roles}
    for section, settings in config.trained.items():
        if settings.sleep is None:
            continue
        if config.resources.device == "cpu":
            why = "resources.device is cpu, so states are in host memory already"
        elif "inference" not in devices or not devices[section].overlaps(devices["inference"]):
            why = "no inference engine works on the same GPUs"
        else:
            continue
        yield Finding.warning(f"{section}.sleep", f"has no effect: {why}; remove the key")


def seeds_across_updates(config: RunConfig) -> Iterator[Finding]:
    """Yield that one seed does not give one sample where weights arrive while it is drawn."""
    if not isinstance(config, SamplingRunConfig) or not isinstance(config.rollout.schedule, AsyncSchedule):
        return
    if config.inference.wants_seeds:
        yield Finding.warning(
            SEEDS_KEY,
            "with rollout.schedule: async weights arrive in the middle of answers, at a place that depends on time, so "
            "such an answer does not repeat; set rollout.schedule: {type: sync}, or remove it",
        )


def traces_without_effect(config: RunConfig) -> Iterator[Finding]:
    """Yield a number of traces where nothing takes them."""
    metrics = config.metrics
    if metrics.traces_per_step == type(metrics).model_fields["traces_per_step"].default:
        return
    if not any(issubclass(TRACKERS.get(tracker.type), TraceTracker) for tracker in metrics.trackers):
        names = ", ".join(tracker.type for tracker in metrics.trackers) or "none"
        yield Finding.warning(
            "metrics.traces_per_step",
            f"has no effect: no tracker takes traces (metrics.trackers: {names}); remove the key, or add mlflow",
        )


def warm_up_that_never_ends(section: str, settings: TrainerConfig, updates: int) -> Iterator[Finding]:
    """Yield a warm-up that is as long as the run."""
    warmup = settings.optimizer.warmup_steps
    if warmup >= updates:
        yield Finding.warning(
            f"{section}.optimizer.warmup_steps",
            f"the run has {updates} optimizer updates, so {warmup} of warm-up never reach the peak rate",
        )


def idle_devices(made: Plan) -> Iterator[Finding]:
    """Yield devices that no role uses."""
    if made.idle_devices:
        yield Finding.warning("resources.device_mapping", f"no role uses the devices {ranges(made.idle_devices)}")


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers with ranges for those that follow each other.

    >>> ranges([0, 2, 3, 4, 7])
    '0, 2-4, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
