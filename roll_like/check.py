"""Everything about a configuration that can be known without starting Ray, in seconds.

Problems are collected, so that one attempt shows all of them. What depends on the network or on hardware that
another machine has is a note, not an error: a configuration for GPUs is checked on a laptop.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from roll_like.config.plan import GIB, Plan, plan, roles
from roll_like.config.rlvr import RLVRConfig
from roll_like.config.sections import DataSource, ModelConfig, VLLMConfig
from roll_like.data.tasks import TaskSet, TaskSource, load_source
from roll_like.errors import RollLikeError
from roll_like.models.load import ModelShape, load_model_shape, load_tokenizer, resolve_model
from roll_like.registry import REWARDS

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*|[\w-]+")
_FILE_SUFFIXES = {".json", ".jsonl", ".parquet", ".gz", ".zst", ".gguf"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: an `error` stops a run, a `warning` may not be meant, a `note` was not checked."""

    level: Literal["error", "warning", "note"]
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.key}: {self.message}"


@dataclass(slots=True)
class Report:
    """What a check found, and the plan of the run."""

    plan: Plan
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that stop a run."""
        return [finding for finding in self.findings if finding.level == "error"]


def check(config: RLVRConfig) -> Report:
    """Return every problem of `config` that can be known before a run, and its plan."""
    findings: list[Finding] = []
    model, shape = _check_model(config, findings)
    tokenizer = _check_tokenizer(config, model, findings)
    report = Report(plan(config, shape), findings)
    findings += _sizes(config, shape)
    findings += _reference(config, shape)
    tasks = _load_all(config, tokenizer, findings)
    findings += _tasks_are_enough(config, tasks)
    findings += _rows_suit_rewards(config, [*tasks["data"], *tasks["evaluation"]])
    findings += _engine_args(config)
    findings += _output(config, shape)
    findings += _hardware(config, report.plan)
    findings += _settings(config, report.plan)
    return report


def show(report: Report, out: Console, err: Console) -> None:
    """Print errors and warnings to `err`, notes and (without errors) the plan to `out`."""
    order = {"error": 0, "warning": 1, "note": 2}
    for finding in sorted(report.findings, key=lambda finding: order[finding.level]):
        style = {"error": "red", "warning": "yellow", "note": "dim"}[finding.level]
        console = out if finding.level == "note" else err
        console.print(str(finding), style=style, markup=False, highlight=False, soft_wrap=True)
    if report.errors:
        err.print(f"{_count(len(report.errors), 'problem')} found; nothing was started", style="bold red")
    else:
        out.print(report.plan.render())
        out.print("no problem found", style="bold green")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _text(error: RollLikeError) -> str:
    return error.message if error.fix is None else f"{error.message}; {error.fix}"


def _failed(key: str, error: RollLikeError) -> Finding:
    message = _text(error)
    return Finding("error", key, message.removeprefix(f"{key}: "))


def _is_hub_id(path: str) -> bool:
    """Return whether `path` means something on the hub: it has the form of an id and is nothing local."""
    local = Path(path).expanduser()
    return not local.exists() and local.suffix not in _FILE_SUFFIXES and _HUB_ID.fullmatch(path) is not None


def _cached(path: str, revision: str | None) -> Path | None:
    """Return the complete copy of a hub model in the Hugging Face cache, if there is one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(path, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return directory if any(directory.glob("*.safetensors")) else None


def _localised(config: ModelConfig, key: str, findings: list[Finding]) -> ModelConfig | None:
    """Return the model section with a hub id replaced by its cached copy, None where that needs network."""
    if not _is_hub_id(config.path):
        return config
    directory = _cached(config.path, config.revision)
    if directory is not None:
        return config.model_copy(update={"path": str(directory)})
    findings.append(
        Finding(
            "note",
            key,
            f"{config.path} is not checked: it is no local path and not in the Hugging Face cache, so it needs "
            "network; it is downloaded when the run starts",
        )
    )
    return None


def _check_model(config: RLVRConfig, findings: list[Finding]) -> tuple[ModelConfig | None, ModelShape | None]:
    model = _localised(config.model, "model.path", findings)
    if model is None:
        return None, None
    try:
        resolved = resolve_model(model)
        return model.model_copy(update={"path": str(resolved.path)}), load_model_shape(resolved.path)
    except RollLikeError as error:
        findings.append(_failed("model.path", error))
        return None, None


def _check_tokenizer(
    config: RLVRConfig, model: ModelConfig | None, findings: list[Finding]
) -> PreTrainedTokenizerBase | None:
    template = config.model.chat_template
    if template is not None and not template.expanduser().is_file():
        message = f"there is no file {template}; correct the path, or remove the key to use the tokenizer's own"
        findings.append(Finding("error", "model.chat_template", message))
        return None
    named = config.model.tokenizer
    if named is not None:
        section = ModelConfig(path=named, cache_dir=config.model.cache_dir)
        local = _localised(section, "model.tokenizer", findings)
        # a tokenizer of its own is all that is loaded, so the model may be out of reach
        base = model or config.model
        model = base.model_copy(update={"tokenizer": local.path}) if local is not None else None
    if model is None:
        return None
    try:
        return load_tokenizer(model)
    except RollLikeError as error:
        findings.append(_failed("model.tokenizer" if named else "model.path", error))
        return None


def _sizes(config: RLVRConfig, shape: ModelShape | None) -> Iterator[Finding]:
    if shape is None:
        return
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    window = getattr(config.inference, "max_model_len", None) or longest
    if shape.max_positions is not None and window > shape.max_positions:
        yield Finding(
            "error",
            "rollout.max_response_tokens",
            f"prompts and responses of {window} tokens are longer than the {shape.max_positions} that the model was "
            "made for; lower data.max_prompt_tokens, rollout.max_response_tokens or inference.max_model_len",
        )
    engines = roles(config)[1].devices_per_worker
    if config.resources.device == "cuda" and shape.heads % engines:
        yield Finding(
            "error",
            "inference.replicas",
            f"each engine would divide {shape.heads} attention heads among {engines} GPUs; use more replicas, or a "
            f"span that leaves each a divisor of {shape.heads}",
        )


def _reference(config: RLVRConfig, shape: ModelShape | None) -> list[Finding]:
    if config.reference is None or config.reference.path is None:
        return []
    findings: list[Finding] = []
    section = config.model.model_copy(update={"path": config.reference.path, "revision": None})
    model = _localised(section, "reference.path", findings)
    if model is None:
        return findings
    try:
        theirs = load_model_shape(resolve_model(model).path)
    except RollLikeError as error:
        return [*findings, _failed("reference.path", error)]
    if shape is not None and theirs.vocab_size != shape.vocab_size:
        message = (
            f"its vocabulary has {theirs.vocab_size} entries and the policy's {shape.vocab_size}, so their "
            "log-probabilities cannot be compared; use a model of the same family, or leave the key out"
        )
        findings.append(Finding("error", "reference.path", message))
    return findings


class _RowsOnly:
    """Stands in for a tokenizer that cannot be had: rows are checked, lengths are not."""

    def apply_chat_template(self, _messages: list[Any], **_: Any) -> str:
        return ""

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[] for _ in texts]}


def _load_all(
    config: RLVRConfig, tokenizer: PreTrainedTokenizerBase | None, findings: list[Finding]
) -> dict[str, list[TaskSource]]:
    sections = {"data": config.data.sources, "evaluation": config.evaluation.sources if config.evaluation else ()}
    loaded: dict[str, list[TaskSource]] = {"data": [], "evaluation": []}
    for section, sources in sections.items():
        for index, source in enumerate(sources):
            tasks = _load_one(source, f"{section}.sources.{index}", config.data.max_prompt_tokens, tokenizer, findings)
            if tasks is not None:
                loaded[section].append(tasks)
    return loaded


def _load_one(
    source: DataSource,
    key: str,
    limit: int,
    tokenizer: PreTrainedTokenizerBase | None,
    findings: list[Finding],
) -> TaskSource | None:
    if _is_hub_id(source.path):
        message = (
            f"{source.path} is not checked: it is no local path, so it needs network; rows and fields are checked "
            "when the run starts"
        )
        findings.append(Finding("note", key, message))
        return None
    try:
        tasks = load_source(source, tokenizer or cast("PreTrainedTokenizerBase", _RowsOnly()), limit, key)
    except RollLikeError as error:
        findings.append(_failed(key, error))
        return None
    report = tasks.report
    if report.too_long:
        message = (
            f"{report.too_long} of {report.rows} prompts are longer than data.max_prompt_tokens ({limit}) and are left "
            f"out; first: {report.first_too_long}; the longest has {report.longest} tokens"
        )
        findings.append(Finding("warning", key, message))
    return tasks


def _tasks_are_enough(config: RLVRConfig, tasks: dict[str, list[TaskSource]]) -> Iterator[Finding]:
    count = sum(len(source.tasks) for source in tasks["data"])
    if len(tasks["data"]) == len(config.data.sources) and count < config.rollout.prompts_per_step:
        yield Finding(
            "warning",
            "rollout.prompts_per_step",
            f"a step takes {config.rollout.prompts_per_step} prompts, and the data has {count}, so a step has some "
            "of them twice; use fewer, or more data",
        )
    trained = {str(task.messages) for source in tasks["data"] for task in source.tasks}
    for source in tasks["evaluation"]:
        shared = sum(str(task.messages) in trained for task in source.tasks)
        if shared:
            yield Finding(
                "warning",
                "evaluation.sources",
                f"{shared} of {len(source.tasks)} prompts of {source.name!r} are trained on too, so the evaluation "
                "says little about unseen tasks",
            )


def _rows_suit_rewards(config: RLVRConfig, sources: Sequence[TaskSource]) -> Iterator[Finding]:
    for index, section in enumerate(config.rewards.use):
        key = f"rewards.use.{index}"
        wanted = getattr(section, "sources", None)
        try:
            reward = REWARDS.get(section.type)(section)
        except RollLikeError as error:
            yield _failed(key, error)
            continue
        try:
            for source in sources:
                if wanted is None or source.name in wanted:
                    yield from _rows_suit(reward, section.type, key, source)
        finally:
            reward.close()


def _rows_suit(reward: Any, name: str, key: str, source: TaskSource) -> Iterator[Finding]:
    try:
        TaskSet(sources=(source,)).require(reward.required_fields, f"reward {name!r}")
        for task in source.tasks:
            reward.check_row(task)
    except RollLikeError as error:
        yield _failed(key, error)


def _engine_args(config: RLVRConfig) -> Iterator[Finding]:
    given = config.inference.engine_args if isinstance(config.inference, VLLMConfig) else {}
    if not given:
        return
    known = _vllm_arguments()
    if not known:
        yield Finding("note", "inference.engine_args", "not checked: vLLM is not installed here")
        return
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; see vLLM's documentation of AsyncEngineArgs"
            yield Finding("error", f"inference.engine_args.{name}", f"vLLM has no such engine argument{hint}")


def _vllm_arguments() -> set[str]:
    """Return the fields of vLLM's engine arguments, read from its source: importing it takes many seconds."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [Path(folder) / "engine" / "arg_utils.py" for folder in folders]
    return {
        statement.target.id
        for file in files
        if file.is_file()
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in {"EngineArgs", "AsyncEngineArgs"}
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _output(config: RLVRConfig, shape: ModelShape | None) -> Iterator[Finding]:
    folder = (config.output_dir / config.name).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is not a directory" if not there.is_dir() else "may not be written to"
        yield Finding("error", "output_dir", f"{there} {what}; set output_dir to a folder that can be written to")
        return
    if shape is None:
        return
    saved = config.checkpoint
    width = 4 if config.model.dtype == "float32" else 2
    one = shape.parameters * (width + (8 if width == 4 else 12))
    written = bool(saved.every) or saved.at_end
    kept = (saved.keep + (saved.keep_best and config.evaluation is not None)) if written else 0
    export = shape.parameters * width if saved.export else 0
    free = shutil.disk_usage(there).free
    # the new one is complete before an old one goes
    least, most = (one if written else 0) + export, one * (kept + 1 if written else 0) + export
    if free < most:
        yield Finding(
            "error" if free < least else "warning",
            "output_dir",
            f"{there} has {free / GIB:.1f} GiB free; a checkpoint takes about {one / GIB:.1f} GiB, and the run up to "
            f"{most / GIB:.1f} GiB with checkpoint.keep: {saved.keep}; free some, or set output_dir to a larger disk",
        )


def _hardware(config: RLVRConfig, made: Plan) -> Iterator[Finding]:
    resources = config.resources
    if resources.device == "cuda" or resources.address is not None:
        count = f"{resources.nodes} × {resources.devices_per_node}"
        yield Finding("note", "resources", f"the {count} devices are as stated; they are counted when the run starts")
        return
    import psutil

    cores = os.cpu_count() or 1
    if resources.devices_per_node > cores:
        yield Finding(
            "warning",
            "resources.devices_per_node",
            f"{resources.devices_per_node} cores are asked for and this machine has {cores}; a run here needs "
            f"devices_per_node: {cores} and spans to match",
        )
    workers = {role.name: role.workers for role in made.roles}
    needed = sum(line.total * workers[line.role] for line in made.memory)
    memory = psutil.virtual_memory().total
    if needed > memory:
        yield Finding(
            "warning",
            "resources",
            f"all workers together take about {needed / GIB:.1f} GiB, and this machine has {memory / GIB:.1f} GiB; "
            "lower inference.kv_cache_gib, raise training.zero_stage, or use a smaller model",
        )


def _settings(config: RLVRConfig, made: Plan) -> Iterator[Finding]:
    warmup = config.training.optimizer.warmup_steps
    if warmup >= made.updates:
        yield Finding(
            "warning",
            "training.optimizer.warmup_steps",
            f"the run has {made.updates} optimizer updates, so {warmup} of warm-up never reach the peak rate",
        )
    if made.idle_devices:
        listed = ", ".join(map(str, made.idle_devices))
        yield Finding("warning", "resources.spans", f"no role uses the devices {listed}")
