"""Every two of vLLM's options: run by a test, or refused by `--check`. Whoever adds an option says which."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from config_files import changed
from guessing_models import make_eagle3_head, make_mtp_family
from pydantic import ValidationError
from test_config_check import ROW, lines
from test_config_rules import CUDA
from tiny_families import make_family

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check import check
from roll_like.check.data import prompt_findings
from roll_like.inference.vllm.config import VLLMConfig

ROOT = Path(__file__).resolve().parents[2]
#: What changes what is sampled, what is told of it, or what is sent: the key, and values of a configuration.
OPTIONS: dict[str, dict[str, Any]] = {
    "8 bits": {"inference__quantization": "int8"},
    "n-grams": {"inference__speculative": {"method": "ngram"}},
    "suffixes": {"inference__speculative": {"method": "suffix"}},
    "draft": {"inference__speculative": {"method": "draft"}},
    "head": {"inference__speculative": {"method": "eagle3"}},
    "own layers": {"inference__speculative": {"method": "mtp"}},
    "float32 head": {"model__head_dtype": "float32"},
    "changes alone": {"inference__weight_sync": "delta"},
    "top_p and top_k": {"rollout__top_p": 0.9, "rollout__top_k": 64},
    "min_p": {"rollout__min_p": 0.1, "rollout__top_k": 64},
    "batch invariance": {"inference__deterministic": True},
    "adapters": {"training__lora": {}},
    "routes": {"algorithm__router_replay": True},
}
#: Keys of vLLM's section that are options, and those that are none: sizes, places, checks, start.
KEYS = {"quantization", "speculative", "weight_sync", "deterministic", "lora"}
OTHER_KEYS = {
    "type",
    "replicas",
    "max_model_len",
    "max_running",
    "probe_every",
    "probe_tolerance",
    "full_sync_every",
    "kv_cache_gib",
    "gpu_memory_utilization",
    "enforce_eager",
    "engine_args",
    "expert_parallel",
    "sleep",
}
GUESSES = ("n-grams", "suffixes", "draft", "head", "own layers")


@dataclass(frozen=True)
class Refused:
    """What `--check` says.

    Attributes:
        key: What it is about.
        way_out: Words of what to change.
    """

    key: str
    way_out: str


@dataclass(frozen=True)
class Run:
    """The test that runs it."""

    file: str
    test: str


#: Accepted; no GPU has run it yet, and a CPU cannot.
UNTRIED = "accepted"
ON_CPU = Refused("inference.deterministic", "use inference.type: hf")
NO_ROUTES = Refused("algorithm.router_replay", "set inference.type: hf")
SENT_AS_THEY_ARE = Refused("inference.weight_sync", "set it to auto or full")
NO_MASKS = Refused("rollout.top_p", "remove inference.speculative")
NO_MIN_P = Refused("rollout.min_p", "set it to 0, or remove inference.speculative")
NO_SEEDS = Refused("inference.speculative", "remove one of the two")
TOGETHER = "integration/test_options_together.py"
ALONE = Run(TOGETHER, "test_adapters_alone_with_kept_tokens_and_a_head_in_float32")
MERGED = Run(TOGETHER, "test_changes_of_8_bit_weights_with_merged_adapters_kept_tokens_and_a_head_in_float32")
EXPERTS_STAY = Refused("inference.quantization", "remove it")
SPECULATION = "integration/test_speculation.py"
HEAD_CHECKS = Run(SPECULATION, "test_a_head_in_float32_checks_guesses")
SIDE_BY_SIDE = Run(SPECULATION, "test_policy_and_base_model_check_guesses_side_by_side")
EIGHT_BITS_CHECK = Run(SPECULATION, "test_the_policy_with_8_bit_weights_checks_guesses")
OWN_LAYERS = Run(SPECULATION, "test_the_models_own_layers_guess")
#: On a device, what is refused whatever else is set.
SINGLE = {
    "cpu": {"batch invariance": ON_CPU, "routes": NO_ROUTES},
    "cuda": {"changes alone": SENT_AS_THEY_ARE},
}
Outcome = Run | Refused | str
#: Two options → on CPU, and on GPUs.
PAIRS: dict[tuple[str, str], tuple[Outcome, Outcome]] = {
    **{("8 bits", guesses): (EIGHT_BITS_CHECK, UNTRIED) for guesses in GUESSES[:4]},
    ("8 bits", "own layers"): (EXPERTS_STAY, UNTRIED),  # only mixtures have them
    ("8 bits", "float32 head"): (MERGED, UNTRIED),
    ("8 bits", "changes alone"): (MERGED, SENT_AS_THEY_ARE),
    ("8 bits", "top_p and top_k"): (MERGED, UNTRIED),
    ("8 bits", "min_p"): (MERGED, UNTRIED),
    ("8 bits", "batch invariance"): (ON_CPU, UNTRIED),
    ("8 bits", "adapters"): (MERGED, UNTRIED),
    ("8 bits", "routes"): (NO_ROUTES, UNTRIED),
    **{(guesses, "float32 head"): (HEAD_CHECKS, UNTRIED) for guesses in GUESSES},
    **{(guesses, "changes alone"): (HEAD_CHECKS, SENT_AS_THEY_ARE) for guesses in GUESSES},
    **{(guesses, "top_p and top_k"): (NO_MASKS, NO_MASKS) for guesses in GUESSES},
    **{(guesses, "min_p"): (NO_MIN_P, NO_MIN_P) for guesses in GUESSES},
    **{(guesses, "batch invariance"): (ON_CPU, NO_SEEDS) for guesses in GUESSES},
    **{(guesses, "adapters"): (SIDE_BY_SIDE, UNTRIED) for guesses in GUESSES[:4]},
    ("own layers", "adapters"): (OWN_LAYERS, UNTRIED),  # merged
    **{(guesses, "routes"): (NO_ROUTES, UNTRIED) for guesses in ("n-grams", "draft", "head", "own layers")},
    ("suffixes", "routes"): (NO_ROUTES, Refused("algorithm.router_replay", "method: suffix")),
    ("float32 head", "changes alone"): (HEAD_CHECKS, SENT_AS_THEY_ARE),
    ("float32 head", "top_p and top_k"): (ALONE, UNTRIED),
    ("float32 head", "min_p"): (ALONE, UNTRIED),
    ("float32 head", "batch invariance"): (ON_CPU, UNTRIED),
    ("float32 head", "adapters"): (ALONE, UNTRIED),
    ("float32 head", "routes"): (NO_ROUTES, UNTRIED),
    ("changes alone", "top_p and top_k"): (MERGED, SENT_AS_THEY_ARE),
    ("changes alone", "min_p"): (MERGED, SENT_AS_THEY_ARE),
    ("changes alone", "batch invariance"): (ON_CPU, SENT_AS_THEY_ARE),
    ("changes alone", "adapters"): (Refused("inference.weight_sync", "set inference.lora: false"), SENT_AS_THEY_ARE),
    ("changes alone", "routes"): (NO_ROUTES, SENT_AS_THEY_ARE),
    ("top_p and top_k", "min_p"): (ALONE, UNTRIED),
    ("top_p and top_k", "batch invariance"): (ON_CPU, UNTRIED),
    ("top_p and top_k", "adapters"): (ALONE, UNTRIED),
    ("top_p and top_k", "routes"): (NO_ROUTES, UNTRIED),
    ("min_p", "batch invariance"): (ON_CPU, UNTRIED),
    ("min_p", "adapters"): (ALONE, UNTRIED),
    ("min_p", "routes"): (NO_ROUTES, UNTRIED),
    ("batch invariance", "adapters"): (ON_CPU, UNTRIED),
    ("batch invariance", "routes"): (ON_CPU, UNTRIED),
    ("adapters", "routes"): (NO_ROUTES, UNTRIED),
}


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, one that is a mixture of experts, one whose own layers guess, and what guesses beside a model."""
    folder = tmp_path_factory.mktemp("models")
    mixture, guessing = make_family("qwen3_moe", folder / "mixture"), make_mtp_family("glm4_moe", folder / "guessing")
    head = make_eagle3_head(folder / "head")
    return {"": tiny_model, "draft": tiny_model, "head": head, "routes": mixture, "own layers": guessing}


@pytest.fixture
def errors(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `--check` refuses of a run on a device with some options: messages by key."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "train.jsonl", *({**ROW, "prompt": f"Write about river {n}."} for n in range(16)))

    def found(device: str, names: tuple[str, ...]) -> dict[str, str]:
        changes = {key: value for name in names for key, value in OPTIONS[name].items()}
        model = str(models[next((name for name in ("own layers", "routes") if name in names), "")])
        if changes.get("inference__quantization") and device == "cuda":
            changes["inference__quantization"] = "fp8"
        for beside in {"draft", "head"} & set(names):
            changes["inference__speculative"] = changes["inference__speculative"] | {"model": str(models[beside])}
        if device == "cpu" and "changes alone" in names:
            changes |= {"resources__nodes": 2, "resources__address": "auto"}
        base = changed(CUDA, resources__gpu="H100") if device == "cuda" else changed(inference={"type": "vllm"})
        values = changed(changed(base, model={"path": model}), **changes)
        try:
            report = check(RLVRConfig.from_values(values), prompt_findings)
        except ValidationError as error:
            return {".".join(map(str, each["loc"])): each["msg"] for each in error.errors()}
        missing = "needs the package arctic-inference, which is not installed here"
        return {each.key: each.message for each in report.errors if missing not in each.message}

    return found


def require(errors: dict[str, str], outcome: Outcome) -> None:
    if isinstance(outcome, Refused):
        assert outcome.key in errors
        assert outcome.way_out in errors[outcome.key]
    else:
        assert errors == {}


def test_every_key_is_an_option_or_is_known_to_be_none() -> None:
    assert VLLMConfig.model_fields.keys() == KEYS | OTHER_KEYS
    set_by = {key for changes in OPTIONS.values() for key in changes}
    assert {f"inference__{key}" for key in KEYS} - set_by == {"inference__lora"}  # set by training.lora


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_option_by_itself(errors: Any, device: str) -> None:
    for name in OPTIONS:
        require(errors(device, (name,)), SINGLE[device].get(name, UNTRIED))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_options_run_or_are_refused_with_a_way_out(errors: Any, device: str) -> None:
    pairs = [pair for pair in itertools.combinations(OPTIONS, 2) if not set(pair) <= set(GUESSES)]
    assert set(PAIRS) == set(pairs)
    for pair in pairs:
        outcome = PAIRS[pair][device == "cuda"]
        assert device == "cuda" or outcome != UNTRIED, f"{pair}: a CPU can run it"
        require(errors(device, pair), outcome)


def test_the_tests_that_run_them_are_there() -> None:
    named = {outcome for outcomes in PAIRS.values() for outcome in outcomes if isinstance(outcome, Run)}
    for run in named:
        assert f"\ndef {run.test}(" in (ROOT / "tests" / run.file).read_text()
