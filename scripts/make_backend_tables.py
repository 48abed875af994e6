"""Write the tables of docs/backends.md, which follow from the plugins' own rules and capabilities.

.venv/bin/python scripts/make_backend_tables.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from roll_like.config.model import Precision
from roll_like.config.resources import ResourcesConfig
from roll_like.config.training import StateSizes, TrainingConfig
from roll_like.errors import ConfigError
from roll_like.inference.plugin import EnginePlugin
from roll_like.registry import INFERENCE_ENGINES, TRAINING_BACKENDS
from roll_like.training.backend import TrainingBackend

PAGE = Path(__file__).resolve().parents[1] / "docs" / "backends.md"
STAGES = (0, 1, 2, 3)
OFFLOADS = ("none", "optimizer", "optimizer_and_parameters")
RANKS = 8
#: Sizes of Qwen2.5-7B in bfloat16: 28 layers of width 3584, with 4 key-value heads of 128 and MLPs of width 18,944.
_WIDTH, _HEADS, _MLP, _VOCABULARY, _LAYERS = 3584, 4 * 128, 18_944, 152_064, 28
_LAYER = 2 * _WIDTH**2 + 2 * _WIDTH * _HEADS + 3 * _WIDTH * _MLP + 3 * _WIDTH + 2 * _HEADS
_OUTSIDE = 2 * _VOCABULARY * _WIDTH + _WIDTH
SIZES = StateSizes(
    parameters=_LAYERS * _LAYER + _OUTSIDE,
    trained=_LAYERS * _LAYER + _OUTSIDE,
    largest=_VOCABULARY * _WIDTH,
    layer=_LAYER,
    outside=_OUTSIDE,
    width=2,
)


def settings_of(backend: str, **values: Any) -> TrainingConfig:
    """Return the section of a model that a backend trains."""
    return TrainingConfig.model_validate({"backend": backend, "workers": RANKS, **values})


def accepted(backend: str, **values: Any) -> bool:
    """Return whether a backend takes these settings."""
    found = TRAINING_BACKENDS.get(backend).violations(settings_of(backend, **values))
    return not [each for each in found if each.path != ("backend",)]  # what an environment lacks does not count


def stages(backend: str) -> list[int]:
    """Return the ZeRO stages that a backend has."""
    return [stage for stage in STAGES if accepted(backend, zero_stage=stage)]


def _precisions(backend: str) -> Iterator[str]:
    section = settings_of(backend, zero_stage=stages(backend)[-1])
    for dtype in get_args(Precision):
        try:
            TRAINING_BACKENDS.get(backend)(section, dtype=dtype, device="cuda", world_size=RANKS)
        except ConfigError:
            continue
        yield dtype


def _offloads(backend: str) -> Iterator[str]:
    for offload in OFFLOADS[1:]:
        taken = [stage for stage in STAGES if accepted(backend, zero_stage=stage, offload=offload)]
        if taken:
            yield f"`{offload}` (`zero_stage` {_listed(taken)})"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _gib(backend: str, stage: int) -> str:
    found = TRAINING_BACKENDS.get(backend).state_bytes(settings_of(backend, zero_stage=stage), SIZES)
    kept = found.weights + found.gradients + found.optimizer
    return f"{kept / 2**30:.1f} + {max(found.buffers, found.step) / 2**30:.1f}"


def training_table() -> str:
    """Return what each training backend can."""
    names = sorted(TRAINING_BACKENDS.names())
    divided = {
        name: ", ".join(sorted(TRAINING_BACKENDS.get(name).divided(settings_of(name, zero_stage=stages(name)[-1]))))
        for name in names
    }
    for name in (each for each in names if TRAINING_BACKENDS.get(each).divides_layers):
        divided[name] = "optimizer; weights and gradients by the parallel sizes"
    memory = [
        [f"`zero_stage: {stage}`", *(_gib(name, stage) if stage in stages(name) else "–" for name in names)]
        for stage in STAGES
    ]
    return _table(
        ["`training.backend`", *(f"`{name}`" for name in names)],
        [
            ["`zero_stage`", *(_listed(stages(name)) for name in names)],
            ["sharded over the ranks at the highest stage", *(divided[name] for name in names)],
            ["`model.dtype`", *(", ".join(f"`{each}`" for each in _precisions(name)) for name in names)],
            ["`offload` during a step", *("; ".join(_offloads(name)) or "none" for name in names)],
            [
                "ranks divide experts (`expert_parallel`)",
                *(_yes(TRAINING_BACKENDS.get(n).divides_experts) for n in names),
            ],
            [
                "ranks divide matrices (`tensor_parallel`)",
                *(_yes(TRAINING_BACKENDS.get(n).divides_matrices) for n in names),
            ],
            [
                "ranks divide layers (`pipeline_parallel`)",
                *(_yes(TRAINING_BACKENDS.get(n).divides_layers) for n in names),
            ],
            ["`roll-like export` merges its checkpoints", *(_yes(exports(name)) for name in names)],
            *memory,
        ],
    )


def exports(backend: str) -> bool:
    """Return whether a backend's checkpoints can be merged without ranks."""
    return bool(TRAINING_BACKENDS.get(backend).merged is not TrainingBackend.merged)


def inference_table() -> str:
    """Return what each inference engine can."""
    names = sorted(INFERENCE_ENGINES.names())
    configs = {name: INFERENCE_ENGINES.get(name).Config for name in names}
    able = {name: configs[name].capabilities for name in names}
    transports = [", ".join(f"`{each.name}`" for each in able[name].weight_transports) for name in names]
    return _table(
        ["`inference.type`", *(f"`{name}`" for name in names)],
        [
            ["`resources.device`", *(", ".join(f"`{each}`" for each in devices(name)) for name in names)],
            ["weights travel by, fastest first", *transports],
            ["tensor parallelism", *(_yes(able[name].tensor_parallel) for name in names)],
            ["frees GPU memory while a trainer works", *(_yes(able[name].sleep) for name in names)],
            ["requests under way survive updates and sleep", *(_yes(able[name].pause) for name in names)],
            ["log-probabilities of given tokens, for the probe", *(_yes(able[name].prompt_logprobs) for name in names)],
            ["vision-language models", *(_images(name) for name in names)],
            ["serves judges (`judge`)", *(_yes(INFERENCE_ENGINES.get(name).Judge is not None) for name in names)],
        ],
    )


def _images(engine: str) -> str:
    """Return whether an engine can be given images; what an environment lacks does not count."""
    plugin = INFERENCE_ENGINES.get(engine)
    return _yes(plugin.vision_obstacle.__func__ is not EnginePlugin.vision_obstacle.__func__)


def devices(engine: str) -> list[str]:
    """Return the devices that an engine's own rules let it run on."""
    found = []
    for device in ("cpu", "cuda"):
        mapping = {"training": "0", "inference": "0"}
        resources = ResourcesConfig.model_validate({"device": device, "devices_per_node": 1, "device_mapping": mapping})
        config = INFERENCE_ENGINES.get(engine).Config()
        if not list(config.violations(resources)):
            found.append(device)
    return found


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


TABLES = {"training": training_table, "inference": inference_table}


def filled(page: str) -> str:
    """Return the page with its tables made anew, each between a pair of comments that names it."""
    for name, table in TABLES.items():
        start, end = f"<!-- table: {name} -->\n", f"\n<!-- end of table: {name} -->"
        before, opened, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise SystemExit(f"{PAGE} has no place for the table {name!r}: two comments that name it")
        page = before + start + table() + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
