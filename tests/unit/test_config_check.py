from __future__ import annotations

import importlib.util
import io
import json
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_files import changed, write
from model_families import UNDIVIDED
from model_families import make_family as make_stateful
from rich.console import Console
from tiny_families import make_family
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from roll_like import Reward, cli, register_reward
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check import Finding, Report, check, refuse_errors, show
from roll_like.check.data import prompt_findings
from roll_like.check.disk import DiskUse
from roll_like.errors import ConfigError
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.plugin import VLLMPlugin
from roll_like.registry import REWARDS
from roll_like.rewards.trial import Trial

ROOT = Path(__file__).resolve().parents[2]
ROW = {"prompt": "Write about rivers.", "instructions": [{"kind": "no_commas"}]}
Make = Callable[..., Report]


def lines(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with sixteen good rows in train.jsonl and two others in eval.jsonl."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "train.jsonl", *({**ROW, "prompt": f"Write about river {n}."} for n in range(16)))
    lines(tmp_path / "eval.jsonl", *({**ROW, "prompt": f"Write about lake {n}."} for n in range(2)))
    return tmp_path


@pytest.fixture
def make(files: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Check the small configuration with changes."""
    monkeypatch.setattr("roll_like.rewards.trial.TRIAL_SECONDS", 60.0)  # a busy machine is late

    def run(**changes: Any) -> Report:
        values = changed(
            model={"path": str(tiny_model)},
            evaluation={"sources": [{"path": "eval.jsonl"}]},
            algorithm={"loss": "reinforce"},  # has no bounds that one update a step would leave without effect
        )
        return check(RLVRConfig.model_validate(changed(values, **changes)), prompt_findings)

    return run


def only(report: Report, level: str = "error") -> str:
    """Return the one finding of that level, as text."""
    [finding] = [finding for finding in report.findings if finding.level == level]
    return str(finding)


def test_a_good_configuration_has_no_findings_and_a_plan_with_memory(make: Make) -> None:
    report = make()
    assert report.findings == []
    training, inference = report.plan.memory
    assert dict(training.parts)["weights"] > 100_000
    assert dict(inference.parts)["KV cache at most"] == 2**30


# model


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("./nowhere", "error: model.path: there is no file or directory ./nowhere"),
        ("missing.gguf", "error: model.path: there is no file or directory missing.gguf"),
        ("package://no_such_package/x.gguf", "the Python package 'no_such_package' is not installed"),
        ("train.jsonl", "is a file, but neither a directory nor a .gguf file"),
    ],
)
def test_a_model_that_is_not_there(make: Make, path: str, expected: str) -> None:
    assert expected in only(make(model={"path": path}))


def remake(directory: Path, **changes: Any) -> None:
    """Give a model another configuration, and weights that are of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    config.update(changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def test_a_hub_model_without_network_is_a_warning_and_rows_are_checked_still(make: Make, files: Path) -> None:
    lines(files / "train.jsonl", {"prompt": "x"})
    report = make(model={"path": "org/not-in-the-cache"})
    model, rows = map(str, report.warnings)
    assert model.startswith("warning: model.path: org/not-in-the-cache is not checked")
    assert "the data has 1" in rows
    assert "train.jsonl:1" in only(report)
    assert report.plan.memory == ()


TENSOR_PARALLEL = {"backend": "fsdp2", "zero_stage": 3, "workers": 2, "tensor_parallel": 2}


@pytest.mark.parametrize(
    ("changes", "training", "expected"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, {}, "set training.share_prompts: false"),
        ({"layer_types": ["linear_attention", "full_attention"]}, {"share_prompts": False}, None),
        ({"layer_types": ["conv", "full_attention"]}, {}, "set training.share_prompts: false"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            {"share_prompts": False, "attention": "varlen"},
            "set training.attention: dense",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            {"share_prompts": False, "workers": 2, "sequence_parallel": 2},
            "training.attention: auto (varlen here) joins rows",
        ),
        ({}, {"workers": 2, "sequence_parallel": 2}, None),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, {"workers": 2, "sequence_parallel": 2}, "1 query heads"),
        ({}, TENSOR_PARALLEL, None),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, TENSOR_PARALLEL, "has 1 query heads"),
        ({"intermediate_size": 127}, TENSOR_PARALLEL, "this one has 127 inner units of a feed-forward layer"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, {}, "layers of the model are of the type chunked_"),
    ],
)
def test_layers_that_rows_are_not_for(
    make: Make, files: Path, tiny_model: Path, changes: dict[str, Any], training: dict[str, Any], expected: str | None
) -> None:
    other = shutil.copytree(tiny_model, files / "other")
    remake(other, **changes)
    findings = make(model={"path": str(other)}, training=training).findings
    assert [finding.key for finding in findings] == (["model.path"] if expected else [])
    assert all(expected in finding.message for finding in findings if expected)


#: Values that are no size, no type of a model and no precision.
WRONG = (None, [], "x", -1)


def test_no_value_of_a_models_configuration_is_met_by_a_traceback(make: Make, files: Path, tiny_model: Path) -> None:
    other = shutil.copytree(tiny_model, files / "other")
    file = other / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    refused = 0
    for name in written:
        for value in WRONG:
            file.write_text(json.dumps({**written, name: value}), encoding="utf-8")
            refused += bool(make(model={"path": str(other)}).errors)
    assert refused > len(written)
    lora = {"rank": 4}
    for name, value in {"hidden_size": "x", "model_type": "none", "num_attention_heads": 0}.items():
        file.write_text(json.dumps({**written, name: value}), encoding="utf-8")
        assert "model.path" in {finding.key for finding in make(model={"path": str(other)}, training__lora=lora).errors}
    for text in ("", "{", "[]", "3", "\x00", '"x"'):
        file.write_text(text, encoding="utf-8")
        keys = [finding.key for finding in make(model={"path": str(other)}).errors]
        assert keys[0] == "model.path"


def test_a_size_that_is_none_is_named(make: Make, files: Path, tiny_model: Path) -> None:
    other = shutil.copytree(tiny_model, files / "other")
    written = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**written, "num_hidden_layers": "two"}), encoding="utf-8")
    message = "num_hidden_layers is 'two'; expected a whole number above 0; set model.path to a complete model"
    assert message in make(model={"path": str(other)}).errors[0].message


def test_a_model_without_a_chat_template(make: Make, files: Path, tiny_model: Path) -> None:
    copy = shutil.copytree(tiny_model, files / "bare")
    (copy / "chat_template.jinja").unlink()
    message = only(make(model={"path": str(copy)}))
    assert "has no chat template" in message
    assert "set model.chat_template to a Jinja file" in message
    template = write(files / "t.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert make(model={"path": str(copy), "chat_template": str(template)}).errors == []


def test_a_chat_template_that_is_not_there(make: Make, tiny_model: Path) -> None:
    message = only(make(model={"path": str(tiny_model), "chat_template": "no.jinja"}))
    assert message.startswith(f"error: model.chat_template: there is no file {Path('no.jinja').absolute()}; ")


def test_a_chat_template_that_is_no_jinja(make: Make, files: Path, tiny_model: Path) -> None:
    template = write(files / "t.jinja", "{% for m in messages %}\n{{ m.content }}\n{% endfr %}")
    message = only(make(model={"path": str(tiny_model), "chat_template": str(template)}))
    assert message.startswith(f"error: model.chat_template: {template}:3: Encountered unknown tag 'endfr'")


def test_a_tokenizer_of_its_own(make: Make, tiny_model: Path) -> None:
    assert make(model={"path": str(tiny_model), "tokenizer": str(tiny_model)}).findings == []
    message = only(make(model={"path": str(tiny_model), "tokenizer": "./nowhere"}))
    assert message.startswith("error: model.tokenizer: there is no file or directory ./nowhere")


def test_a_window_longer_than_the_models(make: Make) -> None:
    message = only(make(rollout__max_response_tokens=1000))
    assert "1064 tokens (data.max_prompt_tokens + rollout.max_response_tokens = " in message
    assert message.endswith(
        ") exceed max_position_embeddings (1024); lower data.max_prompt_tokens or rollout.max_response_tokens"
    )
    message = only(make(inference__max_model_len=2000))
    assert message.endswith("exceed max_position_embeddings (1024); lower inference.max_model_len")
    message = only(make(rollout__max_response_tokens=1000, inference__max_model_len=2000))
    assert message.endswith(
        "; lower data.max_prompt_tokens or rollout.max_response_tokens, and inference.max_model_len"
    )


def test_attention_heads_that_gpus_cannot_divide(make: Make) -> None:
    resources = {
        "device": "cuda",
        "gpu": "H100",
        "devices_per_node": 3,
        "device_mapping": {"training": "0-2", "inference": "0-2"},
    }
    message = only(make(resources=resources, training__workers=3))
    assert "each engine would divide 4 attention heads among 3 GPUs" in message


def test_windows_that_vllm_computes_otherwise(make: Make, files: Path, tiny_model: Path) -> None:
    other = shutil.copytree(tiny_model, files / "other")
    written = json.loads((other / "config.json").read_text(encoding="utf-8"))

    def found(**changes: Any) -> list[str]:
        (other / "config.json").write_text(json.dumps({**written, **changes}), encoding="utf-8")
        report = make(model={"path": str(other)}, inference={"type": "vllm"})
        return [finding.message for finding in report.errors if finding.key == "inference.type"]

    cohere = {"model_type": "cohere2", "sliding_window": 95}
    (message,) = found(**cohere)
    assert message.startswith(
        "vLLM lets windows of cohere2 reach one token further than training does, and samples of 96"
    )
    assert "are longer than the window of 95" in message
    assert found(**{**cohere, "sliding_window": 96}) == []
    assert found(model_type="mistral", sliding_window=95) == []
    (message,) = found(head_dim=16, num_attention_heads=8, num_key_value_heads=4)
    assert message.startswith("vLLM's attention on CPU computes heads of 32, 64, 80, ")
    assert "and the model's have 16; use another engine (inference.type: hf), or a GPU" in message


def test_layers_with_a_state_that_vllm_does_not_compute_so(make: Make, tmp_path: Path) -> None:
    gated, mamba = ({"path": str(make_family(name, tmp_path / name))} for name in ("qwen3_next", "nemotron_h"))
    message = only(make(model={**gated, "dtype": "float32"}, inference={"type": "vllm"}))
    assert "inference.type: vLLM computes gated delta layers on CPU in bfloat16 and with heads of 128 " in message
    assert "found float32 and 16; set model.dtype: bfloat16" in message
    assert make(model=gated, inference={"type": "hf"}).errors == []
    assert make(model=mamba, inference={"type": "vllm"}).errors == []
    one = {
        "device": "cuda",
        "gpu": "H100",
        "devices_per_node": 1,
        "device_mapping": {"training": "0", "inference": "0"},
    }
    assert make(model=gated, resources=one, inference={"type": "vllm"}).errors == []
    message = only(make(model=mamba, resources=one, inference={"type": "vllm", "deterministic": True}))
    assert (
        "inference.deterministic: vLLM has no batch-invariant kernels for recurrent layers, which nemotron_h" in message
    )
    guessing = {"type": "vllm", "speculative": {"method": "ngram"}}
    for resources in ({"resources": one}, {}):
        message = only(make(model=mamba, **resources, inference=guessing))
        assert message.startswith(
            "error: inference.speculative: vLLM cannot roll back recurrent states (nemotron_h) after"
        )
    drafting = make(inference={"type": "vllm", "speculative": {"method": "draft", "model": mamba["path"]}})
    assert any("has layers with a state, and vLLM guesses with other" in found.message for found in drafting.errors)


#: A family with layers of a state → what vLLM says of it on a CPU, and on a GPU.
STATES_IN_VLLM = {
    "falcon_h1": ("", ""),
    "granitemoehybrid": ("", ""),
    "lfm2": ("", ""),
    "jamba": ("vLLM on a CPU has no kernel of Mamba 1's scan, which jamba needs; set inference.type: hf, or", ""),
    "kimi_linear": ("vLLM on a CPU has no gated delta layers without Triton, which kimi_linear needs", ""),
    "olmo_hybrid": ("vLLM on a CPU has no gated delta layers without Triton, which olmo_hybrid needs", ""),
    "nemotron_h": ("vLLM on a CPU has no experts without a gate, which nemotron_h needs", ""),
    "falcon_h1 with limits": ("vLLM bounds no time steps of Mamba layers, and config.json has time_step_limit: [0.01",)
    * 2,
    "lfm2 with an output layer": ("vLLM computes the output layer of lfm2 with the embedding, and this model has one",)
    * 2,
    "bamba": ("the installed vLLM has no BambaForCausalLM; set inference.type: hf",) * 2,
    "minimax": ("the installed vLLM has no MiniMaxForCausalLM; set inference.type: hf",) * 2,
}


@pytest.mark.parametrize("family", STATES_IN_VLLM)
def test_layers_with_a_state_that_vllm_lacks(family: str) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("the models of the installed vLLM are looked up")
    kind, *own = family.split()
    config = CONFIG_MAPPING[kind](architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]])
    config.tie_word_embeddings = own != ["with", "an", "output", "layer"]
    config.time_step_limit = (0.01, 0.1) if own == ["with", "limits"] else (0.0, float("inf"))
    for device, expected in zip(("cpu", "cuda"), STATES_IN_VLLM[family], strict=True):
        found = VLLMPlugin.states_findings(VLLMConfig(), config, dtype="bfloat16", device=device)
        assert [finding.message[: len(expected)] for finding in found] == [expected] * bool(expected)


def test_a_state_that_runs_through_a_row_is_said_before_the_run(make: Make, files: Path, tiny_model: Path) -> None:
    other = shutil.copytree(tiny_model, files / "other")
    make_stateful(UNDIVIDED, vocab_size=512).save_pretrained(other)

    def found(share: bool, **changes: Any) -> list[str]:
        report = make(model={"path": str(other)}, inference={"type": "hf"}, training__share_prompts=share, **changes)
        return [str(finding) for finding in report.errors if "runs through a row" in finding.message]

    (message,) = found(True)
    assert message.endswith(
        "and training.share_prompts puts several samples into one row; set training.share_prompts: false"
    )
    assert found(False) == []


def test_experts_that_there_are_not_or_that_nothing_divides(make: Make, tmp_path: Path) -> None:
    two = {
        "device": "cuda",
        "gpu": "H100",
        "devices_per_node": 2,
        "device_mapping": {"training": "0-1", "inference": "0-1"},
    }
    divided = {"resources": two, "training__workers": 2, "inference__expert_parallel": True}
    message = only(make(**divided))
    assert message.startswith("error: inference.expert_parallel: the model has no experts to divide")
    mixture = {"path": str(make_family("qwen3_moe", tmp_path / "moe"))}
    assert make(**divided, model=mixture).errors == []
    expected = "true divides experts among the GPUs of an engine, and "
    with pytest.raises(ConfigError, match=f"{expected}each engine has one GPU"):
        make(**divided, inference__replicas=2, model=mixture)
    with pytest.raises(ConfigError, match=f"{expected}resources.device is cpu"):
        make(inference__expert_parallel=True, model=mixture)


def test_experts_that_ranks_of_the_trainer_cannot_divide(make: Make, tmp_path: Path) -> None:
    devices = {
        "device": "cuda",
        "gpu": "H100",
        "devices_per_node": 6,
        "device_mapping": {"training": "0-5", "inference": "0-5"},
    }
    six = {"backend": "fsdp2", "zero_stage": 3, "workers": 6}
    mixture = {"model": {"path": str(make_family("qwen3_moe", tmp_path / "moe"))}}

    def found(model: dict[str, Any], ranks: int) -> list[str]:
        training = {**six, "expert_parallel": ranks}
        report = make(resources=devices, training=training, **model, inference__replicas=6)
        return [f"{finding.key}: {finding.message}" for finding in report.errors]

    assert found(mixture, 2) == []
    (message,) = found(mixture, 3)
    assert message.startswith(
        "model.path: expert_parallel: 3 divides experts among 3 ranks, and a layer of the model has"
    )
    assert message.endswith("has 4; set it to one of 1, 2, 4")
    (message,) = found({}, 2)
    assert "2 divides experts among 2 ranks, and no layer of the model has any; remove the key" in message


def test_a_reference_model_of_another_vocabulary(make: Make, files: Path, tiny_model: Path) -> None:
    other = shutil.copytree(tiny_model, files / "other")
    remake(other, vocab_size=100)
    message = only(make(algorithm={"kl": {"use": "loss"}}, reference={"path": str(other)}))
    assert "error: reference.path: its vocabulary has 100 entries and the policy's 512" in message
    assert make(algorithm={"kl": {"use": "loss"}}, reference={"path": str(tiny_model)}).errors == []
    message = only(make(algorithm={"kl": {"use": "loss"}}, reference={"path": "./nowhere"}))
    assert message.startswith("error: reference.path: ")


def test_a_critic_from_a_model_of_its_own(make: Make, files: Path, tiny_model: Path) -> None:
    gae = {"advantage": "gae"}
    assert make(algorithm=gae, critic={"path": str(tiny_model)}).errors == []
    other = shutil.copytree(tiny_model, files / "other")
    remake(other, vocab_size=100)
    assert "error: critic.path: its vocabulary has 100 entries" in only(
        make(algorithm=gae, critic={"path": str(other)})
    )
    remake(other, vocab_size=512, max_position_embeddings=50)
    message = only(make(algorithm=gae, critic={"path": str(other)}))
    assert "error: critic.path: samples of 96 tokens exceed this model's max_position_embeddings (50)" in message
    assert only(make(algorithm=gae, critic={"path": "./nowhere"})).startswith("error: critic.path: ")


def test_warm_up_that_lasts_longer_than_the_run(make: Make) -> None:
    report = make(algorithm={"advantage": "gae"}, critic={"optimizer": {"warmup_steps": 20}, "updates_per_step": 2})
    message = only(report, "warning")
    assert "critic.optimizer.warmup_steps: the run has 20 optimizer updates, so 20 of warm-up never reach" in message
    report = make(algorithm={"advantage": "gae"}, critic={"warmup_steps": 8}, training__optimizer={"warmup_steps": 2})
    assert "training.optimizer.warmup_steps: the run has 2 optimizer updates" in only(report, "warning")


# data


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["{"], "train.jsonl:1: not JSON"),
        ([ROW, {"text": "x", "instructions": []}], "train.jsonl:2: the row has no field 'prompt'; it has 'text'"),
        (
            [ROW, {"prompt": "x"}],
            "train.jsonl:2: the field 'instructions' cannot be checked: the row has neither it nor",
        ),
        ([ROW, ROW, {"prompt": "x", "instructions": [{"kind": "no_comas"}]}], "train.jsonl:3: "),
    ],
)
def test_the_first_bad_row_is_named(make: Make, files: Path, rows: list[dict[str, Any] | str], expected: str) -> None:
    lines(files / "train.jsonl", *rows)
    assert expected in only(make())


def test_a_missing_data_file(make: Make) -> None:
    report = make(data__sources=[{"path": "a.jsonl"}, {"path": "train.jsonl"}, {"path": "./b"}])
    assert [finding.key for finding in report.errors] == ["data.sources.0", "data.sources.2"]
    assert "there is no file or directory a.jsonl" in report.errors[0].message
    assert "correct data.sources.2.path" in report.errors[1].message


def test_what_a_run_writes_is_said_before(make: Make) -> None:
    gib = 2.0**30
    assert str(DiskUse(3 * gib, 2, gib / 4)) == (
        "on disk: exported model 0.25 GiB, 2 checkpoints of 3 GiB; at most 9.2 GiB at a time"
    )
    assert str(DiskUse(3 * gib, 2, gib / 4, none_below=10)) == (
        "on disk: exported model 0.25 GiB, 2 checkpoints of 3 GiB, if the run takes more than 10 minutes; "
        "at most 9.2 GiB at a time"
    )
    assert str(DiskUse(3 * gib, 1, 0)) == "on disk: 1 checkpoint of 3 GiB; at most 6 GiB at a time"
    assert str(DiskUse(3 * gib, 0, gib)) == "on disk: exported model 1 GiB; at most 1 GiB at a time"
    assert str(DiskUse(gib, 0, 0)) == "on disk: no checkpoint, no model"
    report = make(checkpoint={"keep": 3, "keep_best": False})
    assert report.disk is not None
    assert (report.disk.kept, report.disk.least) == (3, report.disk.export)  # it may be short
    assert f"3 checkpoints of {report.disk.checkpoint / gib:.2g} GiB, if the run takes more than" in repr(report)
    every = make(checkpoint={"keep": 3, "keep_best": False, "every": 2}).disk
    assert every is not None
    assert every.least == every.checkpoint + every.export
    nothing = make(checkpoint={"every_minutes": 0, "at_end": False, "export": False})
    assert "on disk: no checkpoint, no model" in repr(nothing)


def test_a_hub_dataset_is_a_warning(make: Make) -> None:
    report = make(data__sources=[{"path": "org/dataset"}])
    assert "warning: data.sources.0: org/dataset is not checked" in only(report, "warning")
    assert report.errors == []


def test_long_prompts_are_counted(make: Make, files: Path) -> None:
    short = [{**ROW, "prompt": f"River {n}."} for n in range(8)]
    lines(files / "train.jsonl", *short, {**ROW, "prompt": "river " * 100})
    message = only(make(), "warning")
    assert "warning: data.sources.0: 1 of 9 prompts are longer than data.max_prompt_tokens (64)" in message
    assert "first: train.jsonl:9" in message


def test_fewer_tasks_than_a_step_takes(make: Make, files: Path) -> None:
    lines(files / "train.jsonl", ROW, {**ROW, "prompt": "Write about seas."})
    assert "one step takes 8 prompts, and the data has 2" in only(make(), "warning")


def test_prompts_that_stand_there_many_times(make: Make, files: Path) -> None:
    rows = [{**ROW, "prompt": f"River {n}."} for n in range(8)]
    lines(files / "train.jsonl", *rows, *rows)
    assert make().warnings == []
    lines(files / "train.jsonl", *rows, *rows, rows[0])
    assert "the data has 17 prompts, and only 8 different ones" in only(make(), "warning")


def test_evaluation_prompts_that_are_trained_on(make: Make, files: Path) -> None:
    lines(files / "eval.jsonl", {**ROW, "prompt": "Write about river 3."}, ROW)
    assert "1 of 2 prompts of 'eval' are trained on too" in only(make(), "warning")


def test_an_evaluation_whose_samples_are_compared_with_each_other(make: Make, files: Path) -> None:
    use = [{"type": "consensus", "compare": "exact_match"}]
    assert "of 'eval' eval/avg says how far they agree" in only(make(rewards={"use": use}), "warning")
    judged = [{**use[0], "sources": ["train"]}, {"type": "ifeval", "sources": ["eval"]}]
    assert make(rewards={"use": judged}).warnings == []


# rewards


@pytest.fixture
def toy_reward() -> Any:
    @register_reward("toy_of_check")
    class Toy(Reward):
        closed = 0

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if config.weight == 2:
                raise OSError("no such server")

        def check_row(self, task: Any) -> None:
            if task.origin.endswith(":5"):
                raise ZeroDivisionError("oh")

        def score(self, completions: Any) -> list[float]:
            return [0.0 for _ in completions]

        def close(self) -> None:
            type(self).closed += 1

    yield Toy
    del REWARDS._plugins["toy_of_check"]


def test_a_reward_that_raises_is_a_finding(make: Make, toy_reward: Any) -> None:
    message = only(make(rewards={"use": [{"type": "toy_of_check", "weight": 2}]}))
    assert message.startswith("error: rewards.use.0: reward 'toy_of_check' cannot be made: OSError: no such server (")
    assert f"({__file__}:" in message
    message = only(make(rewards={"use": ["toy_of_check"]}))
    expected = "error: rewards.use.0: train.jsonl:5: reward 'toy_of_check' fails: ZeroDivisionError: oh ("
    assert message.startswith(expected)
    assert toy_reward.closed == 1


@pytest.mark.parametrize("place", ["__init__", "required_fields", "check_row", "score", "close"])
def test_a_reward_that_ends_the_process_is_a_finding(make: Make, toy_reward: Any, place: str) -> None:
    def end(*_: Any) -> Any:
        sys.exit("no key")

    setattr(toy_reward, place, property(end) if place == "required_fields" else end)
    found = [str(error) for error in make(rewards={"use": ["toy_of_check"]}).errors]
    assert found
    assert any("SystemExit: no key" in text and f"({__file__}:" in text for text in found)


def test_a_long_message_of_other_code_is_shortened_where_it_is_shown(make: Make, toy_reward: Any) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("\n".join(f"line {number}" for number in range(40)))

    toy_reward.__init__ = fail
    report = make(rewards={"use": ["toy_of_check"]})
    assert only(report).count("\n") == 39
    err = io.StringIO()
    show(report, Console(file=io.StringIO()), Console(file=err))
    lines = err.getvalue().splitlines()
    assert len(lines) <= 12
    assert lines[5] == "… 32 lines are left out; --check --debug shows them"
    assert f"line 39 ({__file__}:" in err.getvalue()
    with pytest.raises(ConfigError, match="… 32 lines are left out") as caught:
        refuse_errors(report)
    assert len(str(caught.value).splitlines()) <= 12
    err = io.StringIO()
    show(report, Console(file=io.StringIO()), Console(file=err), whole=True)
    assert len(err.getvalue().splitlines()) > 40


def test_a_reward_that_is_slow_here_is_a_warning(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Trial(failures={}, tried=("the reference answer", "an empty answer"), late="the reference answer")
    monkeypatch.setattr("roll_like.check.data.try_reward", lambda reward, task: late)
    report = make(rewards={"use": ["ifeval"]})
    assert report.errors == []
    slow = [finding.message for finding in report.findings if "within 5 s" in finding.message]
    assert slow
    assert all(
        text.endswith("reward 'ifeval' did not score the reference answer within 5 s, so it was not tried")
        for text in slow
    )


def test_only_the_sources_of_a_reward_are_checked(make: Make, files: Path) -> None:
    lines(files / "eval.jsonl", {"prompt": "x", "answer": "4"})
    both = [{"type": "ifeval", "sources": ["train"]}, {"type": "math", "sources": ["eval"]}]
    evaluation = {"sources": [{"path": "eval.jsonl", "answer_field": "answer"}]}
    assert make(rewards={"use": both}, evaluation=evaluation).errors == []


#: Rows of two kinds, as public mixtures have them: the field says which reward scores a row.
MIXED = [
    *({"prompt": f"1 + {n}?", "data_source": "sums__small", "answer": str(1 + n)} for n in range(9)),
    *({**ROW, "prompt": f"Write about sea {n}.", "data_source": "forms"} for n in range(7)),
]
BY_KIND = [{"type": "math", "domains": ["sums__*"]}, {"type": "ifeval", "domains": ["forms"]}]
NAMED = {"path": "mixed.jsonl", "domain_field": "data_source", "answer_field": "answer"}


def mixed(make: Make, files: Path, use: Any = BY_KIND, rows: Any = MIXED, **changes: Any) -> Report:
    lines(files / "mixed.jsonl", *rows)
    data = {"sources": [NAMED | changes.pop("source", {})], "max_prompt_tokens": 64}
    return make(data=data, rewards={"use": use}, evaluation=None, **changes)


def test_one_file_may_name_the_rewards_of_its_rows(make: Make, files: Path) -> None:
    assert mixed(make, files).findings == []
    by_section = {"sums__small": {"rewards": ["math"]}, "forms": {"rewards": ["ifeval"]}}
    assert mixed(make, files, ["math", "ifeval"], domains=by_section).findings == []


def test_each_reward_is_tried_on_the_rows_that_it_scores(make: Make, files: Path) -> None:
    """The first row is a sum: `ifeval` would miss its field there, and `math` an answer in the others."""
    found = mixed(make, files, rows=[*MIXED, {"prompt": "x", "data_source": "sums__large"}])
    assert "mixed.jsonl:17: reward 'math' needs the field 'answer'" in only(found)
    found = mixed(make, files, rows=[*MIXED, {"prompt": "x", "data_source": "forms"}])
    assert "rewards.use.1: mixed.jsonl:17: the field 'instructions' cannot be checked" in only(found)


def test_rows_that_no_reward_scores_are_counted(make: Make, files: Path) -> None:
    rows = [
        *MIXED,
        *({"prompt": f"{kind} {n}", "data_source": kind} for kind in ("stem", "stem", "logic") for n in "ab"),
    ]
    text = only(mixed(make, files, rows=rows))
    assert text == (
        "error: data.sources.0.domain_field: no reward scores 6 of 22 rows of 'mixed': those of the domains stem (4), "
        "logic (2); first: mixed.jsonl:21; add them to the `domains` of a reward, or leave them out by "
        "data.sources.0.where"
    )
    kept = mixed(make, files, rows=rows, source={"where": {"data_source": ["sums__small", "forms"]}})
    assert kept.errors == []
    assert only(kept, "note") == (
        "note: data.sources.0.where: 6 of 22 rows with a 'data_source' that `where` does not keep are left out"
    )


def test_a_reward_that_no_row_names_is_an_error(make: Make, files: Path) -> None:
    use = [*BY_KIND, {"type": "exact_match", "domains": ["geography"]}]
    texts = [str(finding) for finding in mixed(make, files, use).errors]
    assert texts == [
        "error: rewards.use.2.domains: no row is of the domain 'geography'; there are sums__small (9), forms (7)",
    ]
    by_section = {name: {"rewards": [reward]} for name, reward in (("sums__small", "math"), ("forms", "ifeval"))}
    assert only(mixed(make, files, ["math", "ifeval", "exact_match"], domains=by_section)) == (
        "error: rewards.use.2: the reward 'exact_match' scores no row; there are rows of sums__small (9), forms (7); "
        "correct its `domains` and `sources`, name it in the section `domains`, or remove it"
    )
    section = {"sums_small": {"difficulty": {"of": "mean", "low": 0.1, "high": 0.9}}}
    assert only(mixed(make, files, domains=section)) == (
        "error: domains.sums_small: no row is of this domain; did you mean 'sums__small'? there are sums__small (9), "
        "forms (7)"
    )


def test_a_key_is_said_once(make: Make, files: Path) -> None:
    text = only(mixed(make, files, source={"domain_weights": {"forms": 1}}))
    assert text.startswith(
        "error: data.sources.0: mixed.jsonl: there is no weight for the domains sums__small (9); add"
    )


def test_a_reward_for_no_domain_is_refused(make: Make, files: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.use\.0\.domains: found \[\]; expected a list of 1 or more"):
        mixed(make, files, [{"type": "math", "domains": []}])


def test_rows_that_are_streamed_need_no_tokenizer(make: Make, files: Path) -> None:
    found = mixed(make, files, source={"streaming": True}, model={"path": "nobody/not-here"})
    assert [each for each in found.errors if each.key.startswith("data")] == []
    assert "the first 1,024 rows of 'mixed' were checked" in str(found.findings)


def test_rows_that_are_streamed_say_nothing_of_those_that_were_not_read(make: Make, files: Path) -> None:
    use = [*BY_KIND, {"type": "exact_match", "domains": ["geography"]}]
    assert mixed(make, files, use, source={"streaming": True}).errors == []


def test_rows_without_what_a_curriculum_reads(make: Make, files: Path) -> None:
    rows = [{**ROW, "prompt": f"Write about river {n}.", "rate": 0.5, "level": n} for n in range(16)]
    del rows[4]["level"]
    rows[7]["rate"] = 50
    lines(files / "train.jsonl", *rows)
    data = {"sources": [{"path": "train.jsonl"}], "max_prompt_tokens": 64}
    stages = {"type": "stages", "field": "level", "limits": [3, 9]}
    for curriculum, message in (
        ({"type": "difficulty", "rate_field": "rate"}, "train.jsonl:8: expected a solve rate from 0 to 1 in 'rate'"),
        ({"type": "solve_rate", "rate_field": "pass_rate"}, "train.jsonl:1: expected a number in 'pass_rate'"),
        (stages, "train.jsonl:5: expected a number in 'level', the difficulty, found None"),
    ):
        assert only(make(data=data | {"curriculum": curriculum})).startswith(f"error: data.curriculum: {message}")
    lines(files / "train.jsonl", *(row | {"level": 1} for row in rows))
    assert make(data=data | {"curriculum": stages}).findings == []


# engine, output, hardware


def test_engine_arguments_are_those_of_vllm(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"type": "vllm", "engine_args": {"block_size": 32, "enable_prefix_caching": True}}
    assert make(inference=good).findings == []
    wrong = {"type": "vllm", "engine_args": {"enable_prefix_cachin": True}}
    message = only(make(inference=wrong))
    assert message.startswith("error: inference.engine_args.enable_prefix_cachin: vLLM has no such engine argument")
    assert "did you mean 'enable_prefix_caching'?" in message
    monkeypatch.setattr("roll_like.inference.settings.importlib.util.find_spec", lambda name: None)
    assert "vLLM is not installed here" in only(make(inference=wrong), "note")


@pytest.mark.parametrize(
    ("attention", "prompt", "said"),
    [
        ("auto", 9000, "auto is dense here, with a mask of L × L bytes a row: 0.08 GiB for a sample of 9032 tokens"),
        ("dense", 9000, "dense is dense here"),
        ("varlen", 9000, None),
        ("auto", 100, None),
    ],
)
def test_masks_of_long_rows_are_a_warning(make: Make, attention: str, prompt: int, said: str | None) -> None:
    rollout = {"data__max_prompt_tokens": prompt, "rollout__max_response_tokens": 32}
    report = make(training={"attention": attention, "max_tokens_per_micro_batch": 16384}, **rollout)
    found = [each.message for each in report.warnings if each.key == "training.attention"]
    assert [said in message for message in found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        ({"inference": {"sleep": False}}, "inference.sleep", "resources.device is cpu, where there is no GPU memory"),
        ({"training": {"sleep": True}}, "training.sleep", "resources.device is cpu, so states are in host memory"),
        (
            {"rollout__redundant_samples": 3},
            "rollout.redundant_samples",
            "to finish are kept, which prefers short ones",
        ),
    ],
)
def test_settings_without_effect_or_with_one_that_is_not_meant(make: Make, changes: Any, key: str, why: str) -> None:
    message = only(make(**changes), "warning")
    assert message.startswith(f"warning: {key}: ")
    assert why in message


def test_sleep_acts_on_shared_gpus_alone(make: Make) -> None:
    def warnings(training: str, inference: str, **changes: Any) -> list[str]:
        mapping = {
            "device": "cuda",
            "devices_per_node": 2,
            "device_mapping": {"training": training, "inference": inference},
        }
        found = make(resources=mapping, inference={"sleep": True}, training={"sleep": True, **changes}).findings
        return [finding.message for finding in found if finding.key.endswith(".sleep")]

    assert warnings("0", "0", zero_stage=3) == []
    assert warnings("0", "0", zero_stage=0) == []
    apart = warnings("0", "1", zero_stage=3)
    assert len(apart) == 2
    assert "the trainer works on other GPUs" in apart[0]
    assert "no inference engine works on the same GPUs" in apart[1]


def test_the_transformers_engine_on_gpus(make: Make) -> None:
    mapping = {"device": "cuda", "devices_per_node": 1, "device_mapping": {"training": "0", "inference": "0"}}
    assert "keeps its GPU memory while the trainer works" in only(
        make(resources={**mapping, "gpu": "H100"}, inference={"type": "hf"}), "warning"
    )


def test_gpus_that_are_not_here_are_an_error_unless_stated(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = {"device": "cuda", "devices_per_node": 1, "device_mapping": {"training": "0", "inference": "0"}}
    monkeypatch.setattr("roll_like.check.gpu_plan.measured_gpus", list)
    monkeypatch.setattr("roll_like.check.gpu_plan.DRIVER", ())
    found = only(make(resources=resources))
    assert found.startswith(
        "error: resources.gpu: resources.device is cuda, and this machine has no GPU that nvidia-smi"
    )
    assert (
        "set resources.gpu to the kind of its GPUs (such as H100), or resources.gpu_memory_gib; to run here, set"
        in found
    )
    # a container may have a driver and no nvidia-smi
    monkeypatch.setattr("roll_like.check.gpu_plan.DRIVER", ("/",))
    assert "resources.gpu: resources.device is cuda" in only(make(resources=resources), "warning")
    monkeypatch.setattr("roll_like.check.gpu_plan.DRIVER", ())
    for stated in ({"gpu": "H100"}, {"gpu_memory_gib": 80}, {"address": "auto"}):
        report = make(resources={**resources, **stated})
        assert report.warnings == report.errors == []
    monkeypatch.setattr("roll_like.check.gpu_plan.measured_gpus", lambda: [("NVIDIA H200", 140 * 2**30)])
    assert make(resources=resources).warnings == []


def test_a_cache_without_room_for_one_sequence(make: Make) -> None:
    small = make(inference={"type": "vllm", "kv_cache_gib": 0.00001})
    assert only(small).startswith("error: inference.kv_cache_gib: one sequence of 96 tokens needs 4.")
    assert "GiB of key-value cache, and this is 1e-05 GiB; raise it" in only(small)
    assert make(inference={"type": "vllm", "kv_cache_gib": 0.01}).errors == []
    # whose cache may take fewer bits
    fewer = {"type": "vllm", "kv_cache_gib": 0.00001, "engine_args": {"kv_cache_dtype": "fp8"}}
    assert [finding.key for finding in make(inference=fewer).warnings] == ["inference.kv_cache_gib"]


def test_an_output_folder_that_cannot_be_written(make: Make, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "train.jsonl is not a directory" in only(make(output_dir="train.jsonl"))
    monkeypatch.setattr("roll_like.check.machine.os.access", lambda path, mode: Path(path) != files)
    assert f"error: output_dir: {files} may not be written to" in only(make())


@pytest.mark.parametrize(("free", "level"), [(1_000, "error"), (5_000_000, "warning")])
def test_disk_space(make: Make, monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("roll_like.check.machine.shutil.disk_usage", lambda path: usage(2 * free, free, free))
    message = only(make(), level)
    assert "output_dir" in message
    assert "with checkpoint.keep: 2" in message


def test_hardware_of_this_machine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.check.machine.usable_cores", lambda: 1)
    assert "2 cores are configured and a run here may use 1" in only(make(), "warning")
    # a cluster elsewhere is not this machine
    report = make(resources__address="auto")
    assert "the 1 × 2 devices are as stated" in only(report, "note")
    assert [finding for finding in report.findings if finding.level == "warning"] == []


def test_memory_of_this_machine(make: Make) -> None:
    message = only(make(inference={"type": "vllm", "kv_cache_gib": 1_000_000}), "warning")
    assert "all workers together take about 1000000.3 GiB" in message
    assert "lower inference.kv_cache_gib, raise" in message


def test_memory_of_this_machine_with_an_engine_of_other_keys(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = namedtuple("memory", "total")
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory(1000))
    message = only(make(inference={"type": "hf"}), "warning")
    assert "lower inference.max_running, raise" in message
    assert "kv_cache_gib" not in message


def test_settings_that_may_not_be_meant(make: Make) -> None:
    message = only(make(training={"optimizer": {"warmup_steps": 10}}), "warning")
    assert "the run has 10 optimizer updates, so 10 of warm-up never reach the peak rate" in message
    device_mapping = {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": 0, "inference": 0}}
    assert "no role uses the devices 1" in only(make(resources=device_mapping), "warning")


def test_refuse_errors_raises_all_of_them_or_returns_the_rest(make: Make) -> None:
    assert "the data has 16" in only(refuse_errors(make(rollout__prompts_per_step=32)), "warning")
    gone = [{"path": "a.jsonl"}]
    with pytest.raises(ConfigError, match=r"^data\.sources\.0: there is no file or directory a\.jsonl"):
        refuse_errors(make(data__sources=gone))
    with pytest.raises(ConfigError, match=r"(?s)^2 problems; nothing was started:\n  1\. data.*\n  2\. output_dir: "):
        refuse_errors(make(data__sources=gone, output_dir="train.jsonl"))


# from the command line


def test_check_prints_every_problem_and_exits_1(
    files: Path, recording_pipeline: Any, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = changed(
        model={"path": str(tiny_model), "chat_template": "no.jinja"},
        data__sources=[{"path": "gone.jsonl"}],
        output_dir="train.jsonl",
        inference={"type": "vllm", "engine_args": {"blocksize": 1}},
    )
    assert cli.main(["run", "--config", str(write(files / "c.yaml", values)), "--check"]) == 1
    captured = capsys.readouterr()
    keys = [line.split(": ")[1] for line in captured.err.splitlines() if line.startswith("error: ")]
    assert set(keys) == {"model.chat_template", "data.sources.0", "output_dir", "inference.engine_args.blocksize"}
    assert "4 problems found; nothing was started" in captured.err
    assert "Plan of" not in captured.out
    assert recording_pipeline.calls == []


def test_check_prints_the_plan_and_exits_0(
    files: Path, recording_pipeline: Any, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(files / "c.yaml", changed(model={"path": str(tiny_model)}))
    assert cli.main(["run", "--config", str(path), "--check", "steps=3"]) == 0
    captured = capsys.readouterr()
    assert "Plan of rlvr" in captured.out
    assert "3 × 1 = 3" in captured.out
    assert "tasks of train: 16 of 16 rows" in captured.out
    assert "no problem found" in captured.out
    assert recording_pipeline.calls == []


@pytest.mark.parametrize("name", ["rlvr_8gpu_colocated", "rlvr_2nodes_disaggregated"])
def test_gpu_examples_are_accepted_without_a_gpu(
    name: str, recording_pipeline: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["run", "--config", f"configs/{name}.yaml", "--check"]) == 0
    captured = capsys.readouterr()
    assert "1,024 / 4 = 256" in captured.out
    told = captured.err.splitlines()
    assert len(told) == 3
    assert told[0].startswith("warning: model.path: Qwen/Qwen2.5-7B-Instruct is not checked")
    assert told[1].startswith("warning: data.sources.0: ")
    assert "config.json alone is enough for one (`hf download Qwen/Qwen2.5-7B-Instruct config.json`)" in told[0]
    assert "no error in what could be checked; the model was not, and there is no plan of memory" in captured.out
    assert "no error, and" not in captured.out


def test_notes_stay_away_beside_errors(make: Make) -> None:
    out, err = io.StringIO(), io.StringIO()
    report = make()
    report.findings.append(Finding("note", "algorithm.loss", "nothing needs to be changed"))
    show(report, Console(file=out), Console(file=err))
    assert "nothing needs to be changed" in out.getvalue()
    report.findings.append(Finding("error", "model.path", "is not there"))
    out.truncate(0)
    show(report, Console(file=out), Console(file=err))
    assert "nothing needs to be changed" not in out.getvalue() + err.getvalue()
    assert "error: model.path: is not there" in err.getvalue()
