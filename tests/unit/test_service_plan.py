"""What a service takes: its adapters in the engines, and the models that its trainer does not work on."""

from __future__ import annotations

import socket
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import planned
from rich.console import Console

from roll_like.check.gpu_memory import gpu_plans
from roll_like.check.gpu_plan import GPUReport, check_gpus
from roll_like.errors import CheckpointError, ConfigError
from roll_like.models.shape import ModelShape, load_model_shape
from roll_like.run.folder import locked
from roll_like.service.config import load_service_config
from roll_like.service.service import check_service, serving

GIB = 2**30
SHAPE = load_model_shape(Path(__file__).resolve().parents[1] / "data" / "shapes" / "Qwen2.5-7B-Instruct", weights=False)
#: Inputs and outputs of all adapted layers.
WIDTH = 10**6
GPUS = {"device": "cuda", "devices_per_node": 3, "device_mapping": {"training": "0-1", "inference": "2"}}
CPUS = {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}}


def service(folder: Path, **changes: Any) -> Any:
    values = {
        "model": {"path": "org/model", "dtype": "bfloat16"},
        "training": {"lora": {"rank": 20}, "workers": 2},
        "inference": {"type": "vllm", "gpu_memory_utilization": 0.8},
        "resources": GPUS,
        "max_loaded_models": 5,
        "max_loras": 3,
    }
    (folder / "service.yaml").write_text(yaml.safe_dump({**values, **changes}))
    return load_service_config(folder / "service.yaml")


def held(config: Any, shape: ModelShape) -> dict[str, int]:
    """Each state on a GPU, by `role part`, while all are there."""
    made = gpu_plans(config.workers, {"training": shape, "inference": shape}, 80 * GIB)
    return {
        f"{role} {part}": size for each in made for phase in each.phases for (role, part), size in phase.parts.items()
    }


def test_adapters_and_models_aside_are_counted_on_gpus(tmp_path: Path) -> None:
    found = held(service(tmp_path), replace(SHAPE, adapted_width=WIDTH))
    # three of samplers and one from the start, for which vLLM reserves rank 32, in 16 bits
    assert found["inference adapters"] == 4 * 32 * WIDTH * 2
    # float32 weights, a gradient and two moments of four further models, and weights of one more while others are sent
    share = 20 * WIDTH * 4 // 2
    assert found["training gradients"] == share
    assert found["training other models"] == 4 * 4 * share + share
    fewer = held(service(tmp_path, max_loaded_models=1, max_loras=1), replace(SHAPE, adapted_width=WIDTH))
    assert (fewer["training other models"], fewer["inference adapters"]) == (share, 2 * 32 * WIDTH * 2)
    assert fewer["inference KV cache"] - found["inference KV cache"] == 2 * 32 * WIDTH * 2


def test_merged_weights_leave_no_room_for_adapters(tmp_path: Path) -> None:
    found = held(service(tmp_path, inference={"type": "vllm", "lora": False}), replace(SHAPE, adapted_width=WIDTH))
    assert "inference adapters" not in found


def test_of_a_whole_model_the_weights_are_put_aside(tmp_path: Path) -> None:
    """While engines get an older snapshot of it, or the model before any training."""
    found = held(service(tmp_path, training={"workers": 2}), SHAPE)
    assert found["training other models"] == SHAPE.parameters * 4 // 2


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"max_loaded_models": 600}, "max_loaded_models"),
        ({"max_loras": 1500, "max_loaded_models": 1}, "max_loras"),
    ],
)
def test_too_many_of_them_are_refused_with_the_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    config, shape = service(tmp_path, **changes), replace(SHAPE, adapted_width=WIDTH)
    made = gpu_plans(config.workers, {"training": shape, "inference": shape}, 80 * GIB)
    found = [*check_gpus(config.workers, GPUReport(plans=made, memory=80 * GIB, floor=None))]
    assert (key, f"lower {key}") in [(each.key, f"lower {key}") for each in found if each.level == "error"]
    assert any(f"lower {key}" in each.message for each in found)


def test_adapters_and_models_aside_are_counted_on_cpus(tmp_path: Path) -> None:
    config = service(tmp_path, resources=CPUS, training={"lora": {"rank": 20}})
    made = planned(config.workers, replace(SHAPE, adapted_width=WIDTH))
    trainer, engine = (dict(line.parts) for line in made.memory)
    assert trainer["other models"] == 4 * 4 * (80 * WIDTH) + 80 * WIDTH
    # what is computed with, and a copy of it
    assert engine["adapters"] == 2 * 4 * 32 * WIDTH * 2


def test_a_check_shows_them(tmp_path: Path, tiny_model: Path) -> None:
    given = {"model": {"path": str(tiny_model)}, "resources": CPUS, "training": {"lora": {"rank": 4}}}
    config = service(tmp_path, **given, max_sequence_tokens=64)
    report = check_service(config)
    assert not report.errors
    console = Console(width=120, file=StringIO(), record=True)
    console.print(report.plan.render())
    shown = console.export_text()
    assert "5 in the trainer, 3 adapters in each engine; others on disk" in shown
    assert "other models 0.00" in shown
    assert "adapters 0.00" in shown


def test_a_port_in_use_is_named_before_models_are_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = service(tmp_path, port=port, output_dir=str(tmp_path / "runs"))
        named = pytest.raises(ConfigError, match=rf"127.0.0.1:{port} cannot be listened on: .*in use")
        with named as raised, serving(config):
            pass
        # the same service once more
        again = pytest.raises(CheckpointError, match="another process is running in")
        with locked(config.directory), again, serving(config):
            pass
    assert "`port` to one that is free" in str(raised.value)
    assert not (tmp_path / "runs" / "service" / "logs").exists()
