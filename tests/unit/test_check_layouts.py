"""Layouts that the planner proposes: they fit, they are explained, and those that other projects publish fit, too."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from published_layouts import LAYOUTS, PublishedLayout
from rich.console import Console

from roll_like import cli
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.check.gpu_memory import gpu_plans
from roll_like.check.gpu_plan import GPUReport, check_gpus
from roll_like.check.layouts import FRAGMENTATION, GPULayout, Machines, StatedModel, find_layouts, update_seconds
from roll_like.config.gpus import GPU_KINDS
from roll_like.config.training import TrainingConfig
from roll_like.models.megatron_plan import CONVERTED, refuse_no_converter
from roll_like.models.shape import PUBLISHED, load_model_shape
from roll_like.starters.layout_command import base_config, yaml_lines

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "large_models.md"
SHAPES = ROOT / "tests" / "data" / "shapes"
GIB = 2**30


@pytest.fixture(autouse=True)
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Megatron-Core were installed: nothing of it is called here."""
    monkeypatch.setattr("roll_like.training.megatron._package", lambda: iter(()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.model} {layout.source.split()[0]}")
def test_layouts_that_others_publish_fit(layout: PublishedLayout) -> None:
    counted, gib = layout.counted()
    assert gib < GPU_KINDS[layout.gpu].memory_gib
    assert layout.row() in PAGE.read_text(encoding="utf-8"), f"the page says otherwise:\n{layout.row()}"
    stated = StatedModel.read(PUBLISHED / layout.model)
    if stated.model_type in CONVERTED and stated.num_hidden_layers % counted.training.pipeline_parallel == 0:
        refuse_no_converter(stated, counted.training)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "command",
    [
        "roll-like plan Qwen/Qwen3-30B-A3B --gpus 8 --gpu H100",
        "roll-like plan Qwen/Qwen3-235B-A22B --gpus 128 --gpu H100",
    ],
)
def test_the_page_shows_what_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()[1:]) == 0
    shown = capsys.readouterr().out.rstrip()
    page = PAGE.read_text(encoding="utf-8")
    block = page.partition(f"$ {command}\n")[2].partition("```")[0].rstrip()
    assert block == shown


@pytest.mark.parametrize(
    ("model", "gpus", "pipeline"),
    [(PUBLISHED / "Qwen3-235B-A22B", 128, "rlvr"), (SHAPES / "Qwen2.5-72B-Instruct", 32, "sft")],
)
def test_proposed_lines_are_a_configuration_that_fits(
    model: Path, gpus: int, pipeline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` says so, of a file with these lines and no more than a run needs."""
    assert cli.main(["plan", str(model), "--gpus", str(gpus), "--gpu", "H100", "--pipeline", pipeline]) == 0
    shown = capsys.readouterr().out
    lines = shown.partition("\nmodel:")[2].partition("\n\nnext best")[0]
    values: dict[str, Any] = yaml.safe_load("model:" + lines)
    config: Any
    if pipeline == "rlvr":
        more = {
            "steps": 1,
            "data": {"sources": [{"path": "data.jsonl"}], "max_prompt_tokens": 1024},
            "rollout": {"prompts_per_step": 64, "samples_per_prompt": 8, "max_response_tokens": 7168},
            "rewards": {"use": [{"type": "math"}]},
        }
        config = RLVRConfig.model_validate({**values, **more})
    else:
        data = {"sources": [{"path": "data.jsonl"}], "samples_per_step": 512, "max_tokens": 8192}
        config = SFTConfig.model_validate({**values, "epochs": 1, "data": data})
    shape = load_model_shape(model)
    memory = config.resources.gpu_memory
    plans = gpu_plans(config, dict.fromkeys(("training", "inference"), shape), memory)
    assert list(check_gpus(config, GPUReport(plans=plans, memory=memory, floor=None))) == []
    largest = max(phase.total for phase in plans[0].phases if phase.name != "sampling")
    assert f"{largest / GIB:.1f} of 79.6 GiB" in shown


def test_the_page_walks_through_the_memory_of_what_is_proposed() -> None:
    name, machines = "Qwen3-235B-A22B", Machines(gpus=128, gpu="H100")
    config, shape = base_config(name, "rlvr", machines), load_model_shape(PUBLISHED / name)
    assert isinstance(config, RLVRConfig)
    best = find_layouts(config, PUBLISHED / name, machines).fitting[0]
    engines = config.inference.model_copy(update={"replicas": 128 // best.engine_gpus})
    run = config.model_copy(update={"training": best.training, "inference": engines})
    plans = gpu_plans(run, {"training": shape, "inference": shape}, machines.memory)
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(GPUReport(plans=plans, memory=machines.memory, floor=None).render())
    shown = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    assert shown in PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_rows_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the fewest GPUs; the others take seconds each."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scale = importlib.import_module("layout_scale")
    page = PAGE.read_text(encoding="utf-8")
    for model, length in scale.MODELS.items():
        assert scale.row(model, 64, length) in page
    for name in ("layout_scale", "common"):
        sys.modules.pop(name)


def found(name: str, gpus: int, pipeline: str = "sft", **changes: Any) -> tuple[Machines, Any]:
    machines = Machines(gpus=gpus, gpu="H100", per_node=min(8, gpus), **changes)
    return machines, find_layouts(base_config(name, pipeline, machines), PUBLISHED / name, machines)


def test_a_search_is_complete_and_the_same_each_time() -> None:
    machines, layouts = found("Qwen3-30B-A3B", 8)
    assert (layouts.fitting, layouts.too_large) == (found("Qwen3-30B-A3B", 8)[1].fitting, layouts.too_large)
    room = (1 - FRAGMENTATION) * machines.memory
    assert all(layout.phase.total <= room for layout in layouts.fitting)
    assert all(layout.phase.total > room for layout in layouts.too_large)
    seconds = [layout.seconds for layout in layouts.fitting]
    assert seconds == sorted(seconds)
    labels = {layout.label for layout in (*layouts.fitting, *layouts.too_large)}
    assert {"megatron TP 2 · EP 8", "fsdp2 EP 8", "megatron PP 2 · VPP 2 · EP 4"} <= labels
    assert len({(each.label, each.training.gradient_checkpointing) for each in layouts.fitting}) == len(layouts.fitting)
    assert any("4 key heads" in message for message in layouts.refused)


def test_a_model_that_no_machine_can_sample_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """671B in bfloat16 are 156 GiB on each of 8 GPUs."""
    assert cli.main(["plan", "deepseek-ai/DeepSeek-V3", "--gpus", "256", "--gpu", "H100"]) == 1
    shown = capsys.readouterr().out
    assert "no engine: an engine stays within a machine, and each of 8 GPUs would hold 156.2 GiB" in shown
    assert "proposed: " in shown


def test_too_few_gpus_are_said_with_how_many_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "Qwen3-235B-A22B", "--gpus", "16", "--gpu", "H100", "--pipeline", "sft"]) == 1
    shown = capsys.readouterr().out
    assert "nothing fits; 64 GPUs are enough" in shown
    assert "layouts are too large; these miss least:" in shown
    assert "optimizer" in shown


@pytest.mark.parametrize(
    ("arguments", "enough"),
    [
        ("Qwen3-30B-A3B --gpus 1 --gpu H100", 8),
        ("Qwen3-30B-A3B --gpus 2 --gpu H100 --gpus-per-node 5", 10),  # 4, then two whole machines
    ],
)
def test_enough_gpus_of_the_pipeline_with_engines(
    arguments: str, enough: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On machines of the size that is given; with what is said, the same command finds a layout."""
    given = ["plan", *arguments.split()]
    assert cli.main(given) == 1
    assert f"nothing fits; {enough} GPUs are enough" in capsys.readouterr().out
    given[given.index("--gpus") + 1] = str(enough)
    assert cli.main(given) == 0
    assert "proposed: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["org/none", "--gpus", "8"], "is no folder with a config.json"),
        (["Qwen3-30B-A3B", "--gpus", "12"], "12 GPUs are no whole number of machines with 8"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments, "--gpu", "H100"]) == 2
    assert says in capsys.readouterr().err


def test_a_plan_needs_neither_torch_nor_transformers() -> None:
    """So that it answers at once."""
    program = (
        "import sys; from roll_like import cli; "
        "cli.main(['plan', 'Qwen3-30B-A3B', '--gpus', '8', '--gpu', 'H100']); "
        "assert not {'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_estimates_are_those_of_a_hand_count() -> None:
    """Llama 3.1 8B on 8 H100: 64 samples of 8,192 tokens, of a micro-batch each; TP 2, PP 2."""
    shape = load_model_shape(SHAPES / "Llama-3.1-8B-Instruct")
    machines = Machines(gpus=8, gpu="H100", samples=64)
    sizes = {"tensor_parallel": 2, "pipeline_parallel": 2}
    settings = TrainingConfig(backend="megatron", workers=8, max_tokens_per_micro_batch=8192, **sizes)
    tokens = 64 * 8192
    layers, head = 32 * 218_112_000, 128_256 * 4096
    flops = 6 * tokens * (layers + head) + 3 * 2 * tokens * 4096 * 2 * 32 * 4096
    computing = flops / (8 * 989.5e12 * 0.4) * 2 * (layers / 2 + head) / (layers + head)
    passes = 32
    gathers = 16 * 3 * 4 * 8192 * 4096 * 2 / 2 / 450e9
    passed_on = 2 * 8192 / 2 * 4096 * 2 / 450e9
    step = 6 * shape.parameters / 4 / 2 / 450e9
    expected = (computing + passes * (gathers + passed_on) + step) * (1 + 1 / passes)
    assert update_seconds(shape, settings, machines) == pytest.approx(expected, rel=1e-3)


def test_lines_name_sizes_above_one_alone() -> None:
    machines, layouts = found("Qwen3-30B-A3B", 64, length=32768)
    best: GPULayout = layouts.fitting[0]
    values = yaml.safe_load("\n".join(yaml_lines("m", best, machines)))
    assert values["training"]["workers"] == 64
    for key in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel"):
        assert values["training"].get(key, 1) == getattr(best.training, key)
        assert values["training"].get(key) != 1


def test_what_config_json_states_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    stated = json.loads((SHAPES / "Qwen2.5-1.5B-Instruct" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, "rope_scaling": {"type": "yarn", "factor": 2.0}}))
    read = StatedModel.read(tmp_path)
    assert (read.sliding_window, read.rope_parameters["rope_type"]) == (None, "yarn")
    plain = StatedModel.read(SHAPES / "Llama-3.1-8B-Instruct")
    assert (plain.hidden_act, plain.rope_parameters["rope_type"], plain.mlp_only_layers) == ("silu", "default", [])
