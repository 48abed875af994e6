"""`roll-like eval --benchmark`: models measured on benchmarks, one after the other, and compared."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from roll_like.config.benchmarks import FOLDER, BenchmarkUse, benchmark_names, read_benchmark
from roll_like.config.load import load_config
from roll_like.config.sampling import PromptRunConfig
from roll_like.config.source import Source, overridden
from roll_like.data.benchmark_tasks import benchmark_tasks
from roll_like.errors import ConfigError, DataError
from roll_like.models.load import has_chat_template, load_renderer, resolve_model
from roll_like.models.shape import load_model_shape
from roll_like.registry import PIPELINES
from roll_like.rollout.benchmarks import BenchmarkResult, MeanInterval, benchmark_results, paired_difference
from roll_like.run.checkpoint import MANIFEST
from roll_like.run.export import export_checkpoint

#: Texts of messages one after the other, for models without a chat template.
_PLAIN = FOLDER / "plain.jinja"


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """What a model reached.

    Attributes:
        name: What the command called it.
        results: One for each benchmark.
        protocols: Of each benchmark, by name: its protocol, the form in which it was asked, and what was changed.
    """

    name: str
    results: Sequence[BenchmarkResult]
    protocols: Mapping[str, Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "model": self.name,
            "benchmarks": [{**self.protocols[one.name], **one.as_json()} for one in self.results],
        }

    @classmethod
    def read(cls, path: Path) -> list[MeasuredModel]:
        """Return the models of a file that was written before.

        Raises:
            ConfigError: It cannot be read as one.
        """
        try:
            models = json.loads(path.read_text(encoding="utf-8"))["models"]
            return [
                cls(
                    name=model["model"],
                    results=[BenchmarkResult.from_json(one) for one in model["benchmarks"]],
                    protocols={
                        one["benchmark"]: {key: one[key] for key in ("protocol", "form", "changed")}
                        for one in model["benchmarks"]
                    },
                )
                for model in models
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--model {path}: expected what `roll-like eval --benchmark … -o FILE` has written, found: {error!r}",
                fix="name such a file, or the directory of a model",
            ) from error


def benchmark_config(
    path: Path | None, overrides: Sequence[str], uses: Sequence[Mapping[str, Any]], model: str
) -> PromptRunConfig:
    """Return a configuration that measures benchmarks alone.

    Args:
        path: A run's file, whose engine, hardware and model settings are used; None: those of this machine.
        overrides: Keys that are changed, `key=value`.
        uses: The benchmarks, as in `evaluation.benchmarks`.
        model: The first model that is measured.

    Raises:
        ConfigError: Everything that is wrong with it.
    """
    measured = {"benchmarks": list(uses)}
    if path is not None:
        config = load_config(path, overrides)
        if not isinstance(config, PromptRunConfig):
            raise ConfigError(
                f"--config {path}: pipeline {config.pipeline!r} samples no answers to prompts",
                fix="leave --config out, or name a file of pipeline rlvr or online_dpo",
            )
        values = {**config.model_dump(mode="json", by_alias=True), "evaluation": measured}
        return type(config).from_source(Source(values, label=str(path)))
    values = overridden({**_of_this_machine(), "model": {"path": model}, "evaluation": measured}, overrides)
    measuring: PromptRunConfig = PIPELINES.get("rlvr").from_source(Source(values, label="the command line"))
    return measuring


def _of_this_machine() -> dict[str, Any]:
    """Return a run's settings without training: one engine on each GPU, else one on all cores."""
    import torch

    gpus = torch.cuda.device_count()
    count = gpus or torch.get_num_threads()
    devices = f"0-{count - 1}" if count > 1 else "0"
    return {
        "pipeline": "rlvr",
        "name": "benchmarks",
        "steps": 1,
        "data": {"sources": [{"rows": [{"prompt": "."}]}]},
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 1},
        "inference": {"type": "vllm", "replicas": gpus or 1},
        "rewards": {"use": ["length"], "workers": max(1, min(4, count // 2))},
        "resources": {
            "device": "cuda" if gpus else "cpu",
            "devices_per_node": count,
            "device_mapping": {"training": devices, "inference": devices},
        },
    }


def measure_models(config: PromptRunConfig, models: Sequence[str]) -> Iterator[MeasuredModel]:
    """Yield what each model reaches: directories, hub ids, GGUF files, checkpoints, or files of earlier results.

    Every model is looked at before the first one is measured, except checkpoints, which are exported one at a time.

    Raises:
        ConfigError: A benchmark for chats is asked of a model without a chat template, or a file holds no results.
        DataError: As of `refuse_bad_rows`.
    """
    earlier = {model: MeasuredModel.read(Path(model)) for model in models if Path(model).suffix == ".json"}
    there = [model for model in models if model not in earlier and not _is_checkpoint(model)]
    looked_at = {model: _asked(config, model, model) for model in there}
    for model in models:
        if model in earlier:
            yield from earlier[model]
            continue
        with _directory_of(model) as directory:
            asked = looked_at[model] if model in looked_at else _asked(config, directory, model)
            _, collected = asked.pipeline_class().measure(asked, directory)
        yield MeasuredModel(
            name=model,
            results=benchmark_results(collected, asked.benchmarks),
            protocols=_protocols(config.benchmarks, asked.benchmarks),
        )


def _asked(config: PromptRunConfig, directory: str, model: str) -> PromptRunConfig:
    """Return the configuration as a model is asked by it, which is in a directory or on the hub; its rows are good."""
    asked = _in_its_window(_in_its_form(config.evaluating(directory), model), model)
    refuse_bad_rows(asked, model)
    return asked


def refuse_bad_rows(config: PromptRunConfig, model: str) -> None:
    """Refuse benchmarks that a model cannot be asked, before engines start.

    Raises:
        DataError: Rows are not there, of another schema, or too long; with the first problem of each benchmark.
    """
    renderer, problems = load_renderer(config.model), []
    for index, use in enumerate(config.benchmarks):
        key = f"evaluation.benchmarks.{index}.path"
        try:
            benchmark_tasks(use, renderer, key.removesuffix(".path"))
        except DataError as error:
            text = error.message if error.fix is None else f"{error.message}; {error.fix}"
            text = text.replace(f"set {key} to", f"give --data {use.name}=PATH with")
            problems.append(f"{use.label}, for {model}: {text.replace(key, f'--data {use.name}=PATH')}")
    if problems:
        raise DataError("\n  ".join(problems))


def _is_checkpoint(model: str) -> bool:
    """Return whether a model is a checkpoint, which has to be exported before anything can be said about it."""
    return (Path(model) / MANIFEST).is_file()


@contextmanager
def _directory_of(model: str) -> Iterator[str]:
    """Yield where a model is; a checkpoint is exported for as long as it is measured."""
    if not _is_checkpoint(model):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="roll-like-eval-") as folder:
        export_checkpoint(Path(model), Path(folder) / "model")
        yield str(Path(folder) / "model")


def _in_its_form(config: PromptRunConfig, model: str) -> PromptRunConfig:
    """Return the configuration with plain text for benchmarks of any form, where the model has no chat template."""
    if has_chat_template(config.model):
        return config
    for_chats = [use.label for use in config.benchmarks if use.asked_form == "chat"]
    if for_chats:
        others = [name for name in benchmark_names() if read_benchmark(name).form != "chat"]
        raise ConfigError(
            f"{model} has no chat template, and {', '.join(for_chats)} asks in a chat",
            fix="add --form completion to ask by plain text, set model.chat_template to a Jinja file, or leave "
            f"these benchmarks out ({', '.join(others)} work with plain text)",
        )
    plain = config.model.model_copy(update={"chat_template": _PLAIN})
    changed = _asking(config, [use.model_copy(update={"form": "completion"}) for use in config.benchmarks])
    return changed.model_copy(update={"model": plain})


def _in_its_window(config: PromptRunConfig, model: str) -> PromptRunConfig:
    """Return the configuration with limits of prompts that the model has room for; rows are held against them.

    Raises:
        ConfigError: The longest answers alone fill its window.
    """
    window = load_model_shape(resolve_model(config.model).path).max_positions
    if window is None:
        return config
    uses = []
    for use in config.benchmarks:
        room = window - use.sampling.max_response_tokens
        if room < 1:
            raise ConfigError(
                f"{model} was made for {window} tokens, and {use.label} allows answers of "
                f"{use.sampling.max_response_tokens}",
                fix="set --max-response-tokens to what prompts leave of the model's window",
            )
        fits = room >= use.sampling.max_prompt_tokens
        uses.append(use if fits else use.model_copy(update={"max_prompt_tokens": room}))
    return _asking(config, uses)


def _asking(config: PromptRunConfig, uses: Iterable[BenchmarkUse]) -> PromptRunConfig:
    assert config.evaluation is not None, "there is an evaluation"
    evaluation = config.evaluation.model_copy(update={"benchmarks": tuple(uses)})
    return config.model_copy(update={"evaluation": evaluation})


def _protocols(uses: Sequence[BenchmarkUse], asked: Sequence[BenchmarkUse]) -> dict[str, dict[str, Any]]:
    """Return what the results say of each benchmark: what was wanted of it, and the form it was asked in."""
    forms = ["completion" if use.asked_form == "completion" else "chat" for use in asked]
    return {
        use.label: {"protocol": use.benchmark.protocol, "form": form, "changed": use.changed_keys}
        for use, form in zip(uses, forms, strict=True)
    }


def result_tables(models: Sequence[MeasuredModel]) -> Iterator[Table]:
    """Yield a table of all figures, and one of the differences to the first model where there are others."""
    table = Table(title="Benchmarks (95 % intervals)", title_justify="left")
    for column in ("benchmark", "figure", "tasks"):
        table.add_column(column, justify="right" if column == "tasks" else "left", no_wrap=True)
    for model in models:
        table.add_column(model.name, justify="right", overflow="fold")
    found = [{one.name: one for one in model.results} for model in models]
    for name in dict.fromkeys(name for one in found for name in one):
        results = [one[name] for one in found if name in one]
        for index, figure in enumerate(dict.fromkeys(figure for one in results for figure in one.figures)):
            cells = [_cell(one[name].figures.get(figure) if name in one else None) for one in found]
            count = max(one.figures[figure].tasks for one in results if figure in one.figures)
            table.add_row("" if index else name, figure, str(count), *cells)
    yield table
    if len(models) < 2:
        return
    table = Table(title=f"Difference to {models[0].name}, over the same tasks", title_justify="left")
    table.add_column("benchmark")
    for model in models[1:]:
        table.add_column(model.name, justify="right", overflow="fold")
    rows: dict[str, dict[int, str]] = {}
    reasons = []
    for place, other in enumerate(models[1:]):
        for entry in score_differences(models[0], other):
            rows.setdefault(entry["benchmark"], {})[place] = _difference_cell(entry)
            if entry["reason"] is not None:
                reasons.append(f"{other.name}, {entry['benchmark']}: {entry['reason']}")
    for name, row in rows.items():
        table.add_row(name, *(row.get(place, "–") for place in range(len(models) - 1)))
    if reasons:
        table.caption, table.caption_justify = Text("\n".join(reasons)), "left"
    yield table


def _cell(found: MeanInterval | None) -> str:
    if found is None or math.isnan(found.value):
        return "–"
    return f"{found.value:.3f}" + ("" if math.isnan(found.low) else f" [{found.low:.3f}, {found.high:.3f}]")


def _difference_cell(entry: Mapping[str, Any]) -> str:
    if entry["value"] is None:
        return "–"
    return f"{entry['value']:+.3f}" + ("" if entry["low"] is None else f" [{entry['low']:+.3f}, {entry['high']:+.3f}]")


def score_differences(first: MeasuredModel, other: MeasuredModel) -> list[dict[str, Any]]:
    """Return the difference of two models' scores in each benchmark that both were measured on.

    Where they cannot be compared, its `value` is None and `reason` says why.
    """
    theirs = {one.name: one for one in other.results}
    found = []
    for one in (one for one in first.results if one.name in theirs):
        reason = _measured_otherwise(first.protocols[one.name], other.protocols[one.name])
        difference = paired_difference(one.tasks if reason is None else {}, theirs[one.name].tasks)
        if reason is None and not difference.tasks:
            reason = "no task was scored for both"
        place = {"benchmark": one.name, "from": first.name, "to": other.name}
        found.append({**place, **difference.as_json(), "reason": reason})
    return found


def _measured_otherwise(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return what was measured in different ways; None where scores can be compared."""
    same = {"limit"}  # scores are compared over the tasks that both have
    if ours["form"] == theirs["form"]:
        same.add("form")
    keys = {"protocol": (ours["protocol"], theirs["protocol"])}
    keys |= {
        key: (ours["changed"].get(key), theirs["changed"].get(key))
        for key in sorted({*ours["changed"], *theirs["changed"]} - same)
    }
    unequal = [key for key, (one, another) in keys.items() if one != another]
    return f"measured in different ways ({', '.join(unequal)}); measure both by one command" if unequal else None


def results_json(models: Sequence[MeasuredModel]) -> dict[str, Any]:
    """Return everything as plain JSON."""
    return {
        "models": [model.as_json() for model in models],
        "differences": [entry for other in models[1:] for entry in score_differences(models[0], other)],
    }
