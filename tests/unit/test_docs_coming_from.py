"""Every key of ours in the tables of docs/coming_from.md exists; theirs exist where the library is installed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_keys import documented_keys

from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.evaluation import EvaluationConfig
from roll_like.config.other_names import other_names
from roll_like.config.training import CriticConfig, OptimizerConfig
from roll_like.registry import ADVANTAGES, LOSSES, PREFERENCE_LOSSES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
ORACLE = ROOT / ".oracle"
#: How a list's items are written: `environments[].id`.
KEY = re.compile(r"^([a-z_]+(?:\[\])?(?:\.[a-z_]+(?:\[\])?)*)(?:: (\S+))?$")
KINDS = {
    "algorithm.advantage.type": ADVANTAGES.names(),
    "algorithm.loss.type": (*LOSSES.names(), *PREFERENCE_LOSSES.names()),
}


def tables() -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
    """Yield the library, our pipelines, and the cells (theirs, ours) of each table whose heading names pipelines."""
    for library in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        for part in re.split(r"^### ", library, flags=re.M)[1:]:
            ours = re.findall(r"`(\w+)`", part.partition("\n")[0].partition("→")[2])
            rows = re.findall(r"^\| (.*?) \| (.*?) ?\|", part, flags=re.M)[1:]
            yield library.partition("\n")[0], ours, rows


TABLES = list(tables())
OURS = [
    (pipeline, span)
    for _, pipelines, rows in TABLES
    for pipeline in pipelines
    for _, cell in rows
    for span in re.findall(r"`([^`]+)`", cell)
]


def theirs(library: str) -> list[str]:
    """Names in the first column: code, without a value."""
    cells = [cell for name, _, rows in TABLES if name == library for cell, _ in rows]
    return [re.split(r": ", span)[0] for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def test_the_tables_are_found() -> None:
    libraries = (
        "TRL, verl, OpenRLHF, slime, NeMo-RL, AReaL, SkyRL, open-instruct, verifiers, prime-rl, ROLL, Other names"
    )
    assert {name for name, _, _ in TABLES} == set(libraries.split(", "))
    assert len(OURS) > 200
    assert len(theirs("verl")) > 60


@pytest.mark.parametrize(("pipeline", "span"), sorted(set(OURS)))
def test_our_keys_exist(pipeline: str, span: str) -> None:
    found = KEY.match(span)
    assert found, span
    key, value = found[1].replace("[]", ""), found[2]
    assert key in documented_keys()[pipeline]
    if value and key in KINDS:
        assert value in KINDS[key]


def named() -> Iterator[tuple[str, list[str]]]:
    """Yield each setting of another library, by the last part of its name, with the keys of ours in its row."""
    losses = {"sft", "ipo", "robust", "apo_zero", "apo_down"}
    for _, _, rows in TABLES:
        for cell, ours in rows:
            keys = [span.partition(": ")[0].replace("[]", ".0") for span in re.findall(r"`([^`]+)`", ours)]
            for span in re.findall(r"`([^`]+)`", cell):
                # slime's options have hyphens, which nobody writes in a configuration
                name = span.partition(": ")[0].removeprefix("--").replace("-", "_")
                if name not in losses and name[0].islower():
                    yield name, keys


def test_a_configuration_answers_every_name_of_the_page() -> None:
    ours = {key.rpartition(".")[2] for keys in documented_keys().values() for key in keys}
    unanswered, contradicted = [], []
    for name, keys in named():
        last = name.rpartition(".")[2]
        answers = other_names().names.get(last, [])
        foreign = {*name.split(".")} & {*other_names().sections}
        if not answers and last not in ours and last not in other_names().needless and not foreign:
            unanswered.append(name)
        if (
            answers
            and last not in other_names().needless
            and not any(related(key, answer) for key in keys for answer in answers)
        ):
            contradicted.append((name, keys, answers))
    assert (unanswered, contradicted) == ([], [])


def related(key: str, answer: str) -> bool:
    """Return whether two keys are one, or one is the section of the other."""
    return key == answer or key.startswith(f"{answer}.") or answer.startswith(f"{key}.")


def test_every_name_that_a_configuration_answers_is_on_the_page() -> None:
    assert {*other_names().names, *other_names().needless} - {name.rpartition(".")[2] for name, _ in named()} == set()


@cache
def trl_names() -> set[str]:
    """Fields and names of TRL's configuration classes, and fields of transformers' arguments, which they extend."""
    import dataclasses

    from transformers import TrainingArguments

    found = {field.name for field in dataclasses.fields(TrainingArguments)}
    for file in (ORACLE / "trl").rglob("*config.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found |= {node.name, *(s.target.id for s in node.body if isinstance(s, ast.AnnAssign))}  # type: ignore[union-attr]
    return found


@pytest.mark.skipif(not (ORACLE / "trl").is_dir(), reason="TRL is not installed: make oracle-setup")
def test_trls_names_exist() -> None:
    # an argument of the trainer, a column of the data, names of losses
    known = trl_names() | {"reward_funcs", "margin", "sft", "ipo", "robust", "apo_zero", "apo_down"}
    known |= {"PRMTrainer", "step_separator", "train_on_last_step_only"}  # of versions before this one
    assert set(theirs("TRL")) - known == set()


@pytest.mark.skipif(not (ORACLE / "verl").is_dir(), reason="verl is not installed: make oracle-setup")
def test_verls_names_exist() -> None:
    settings: Any = yaml.safe_load((ORACLE / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text())
    missing = []
    for name in theirs("verl"):
        part: Any = settings
        for word in name.split("."):
            part = part.get(word, KeyError) if isinstance(part, dict) else KeyError
        if part is KeyError:
            missing.append(name)
    assert missing == []


def differing() -> dict[str, tuple[str, str]]:
    """Our default, and those of others, by our key in the table of defaults that differ."""
    part = PAGE.partition("| key here |")[2].partition("\n\n")[0]
    return {key: (ours, others) for key, ours, others in re.findall(r"^\| `(.*?)`.*? \| (.*?) \| (.*) \|$", part, re.M)}


def test_the_defaults_that_differ_are_ours() -> None:
    loss, algorithm = LOSSES.get("ppo").Config(), AlgorithmConfig()
    correction, evaluation = algorithm.correction, EvaluationConfig.model_fields
    assert {key: ours for key, (ours, _) in differing().items()} == {
        "algorithm.loss.clip_high": f"{loss.clip_high}",
        "algorithm.loss.dual_clip": f"{loss.dual_clip:g}",
        "algorithm.aggregation": f"`{algorithm.aggregation}`",
        "algorithm.kl.use": f"`{algorithm.kl.use}`",
        "algorithm.correction": f"`{correction.type}`, per {correction.level}, {correction.cap:g}",
        "algorithm.advantage: grpo": "(r − mean)/std, std of n − 1",
        "training.optimizer.weight_decay": f"{OptimizerConfig().weight_decay:g}",
        "critic.value_clip": f"{CriticConfig.model_fields['value_clip'].default:g}",
        "evaluation.temperature": (
            f"{evaluation['temperature'].default:g}, {evaluation['samples_per_prompt'].default}"
        ),
        "evaluation.every: 0": "before and after",
    }


@pytest.mark.skipif(not (ORACLE / "verl").is_dir(), reason="verl is not installed: make oracle-setup")
def test_the_defaults_that_differ_are_verls() -> None:
    settings: Any = yaml.safe_load((ORACLE / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text())
    actor, sampled = settings["actor_rollout_ref"]["actor"], settings["actor_rollout_ref"]["rollout"]["val_kwargs"]
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"], actor["clip_ratio_c"]) == (0.2, 0.2, 3.0)
    assert (actor["loss_agg_mode"], actor["use_kl_loss"]) == ("token-mean", False)
    assert (actor["optim"]["weight_decay"], settings["critic"]["cliprange_value"]) == (0.01, 0.5)
    assert settings["algorithm"]["rollout_correction"]["rollout_is"] is None
    assert (sampled["do_sample"], sampled["n"], settings["trainer"]["val_before_train"]) == (False, 1, True)


@pytest.mark.skipif(not (ORACLE / "trl").is_dir(), reason="TRL is not installed: make oracle-setup")
def test_the_defaults_that_differ_are_trls() -> None:
    tree = ast.parse((ORACLE / "trl" / "trainer" / "grpo_config.py").read_text(encoding="utf-8"))
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GRPOConfig")
    default = {
        field.target.id: ast.literal_eval(word.value)
        for field in config.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(field.value, ast.Call)
        for word in field.value.keywords
        if word.arg == "default"
    }
    assert (default["epsilon"], default["epsilon_high"], default["delta"]) == (0.2, None, None)
    assert (default["loss_type"], default["beta"], default["scale_rewards"]) == ("dapo", 0.0, "group")
    assert (default["vllm_importance_sampling_mode"], default["vllm_importance_sampling_clip_max"]) == (
        "sequence_mask",
        3.0,
    )
