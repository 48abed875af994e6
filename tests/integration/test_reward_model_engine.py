"""The real DeepSpeed engine on scores: its updates are those of a plain loop, and the reward scores as it does."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_specs import cpu_rank
from reward_support import completion
from trained_weights import trained_weights

from roll_like.builtin.pipelines.reward_model.config import RewardModelAlgorithmConfig, ScoredPairData
from roll_like.builtin.pipelines.reward_model.objective import RewardModelObjective
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.builtin.rewards.reward_model import RewardModel, RewardModelConfig
from roll_like.cluster import ResourceManager
from roll_like.config.model import ModelConfig
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.models.card import ModelCard
from roll_like.models.classifier import load_classifier
from roll_like.models.load import load_tokenizer
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.training.start import start_engine
from roll_like.types import Pair
from roll_like.values import reduce

pytestmark = pytest.mark.integration
LR, EPS, SMOOTHING, CENTER = 1e-2, 1e-2, 0.1, 0.05
ROWS = [
    json.loads(line)
    for line in (Path(__file__).resolve().parents[2] / "configs/data/pairs_eval.jsonl").read_text().splitlines()[:5]
]


@pytest.fixture(scope="module")
def pairs(float_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Real pairs, with margins of 0, 0.5, 1, …"""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row | {"by": at / 2}) + "\n" for at, row in enumerate(ROWS)))
    data = ScoredPairData.model_validate({"sources": [{"path": str(path), "margin_field": "by"}]})
    return list(load_scored_pairs(data, Renderer(load_tokenizer(ModelConfig(path=str(float_model))))))


def engine(resources: ResourceManager, model: Path, stack: ExitStack, **training: Any) -> TrainingEngine[Any]:
    config = TrainingConfig(optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": EPS}, **training)
    algorithm = RewardModelAlgorithmConfig(label_smoothing=SMOOTHING, center_coefficient=CENTER)
    spec = cpu_rank(RewardModelObjective(settings=config, algorithm=algorithm, pad_token_id=0), model, seed=3)
    return start_engine("training", spec, resources, DeviceRange.model_validate("0-1"), stack=stack)


def score(model: Any, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers itself makes of each conversation alone."""
    chosen, rejected = (torch.from_numpy(each.token_ids).long()[None] for each in pair.sequences)
    return model(chosen).logits[0, 0], model(rejected).logits[0, 0]


@pytest.fixture(scope="module")
def plain(float_model: Path, pairs: list[Pair]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and weights after one AdamW step in plain PyTorch, written from the formula."""
    model = load_classifier(float_model, "float32", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    loss = torch.tensor(0.0)
    for pair in pairs:
        chosen, rejected = score(model, pair)
        right = torch.sigmoid(chosen - rejected - pair.margin).log()
        wrong = torch.sigmoid(rejected - chosen - pair.margin).log()
        loss = loss - ((1 - SMOOTHING) * right + SMOOTHING * wrong) / len(pairs)
        loss = loss + CENTER * (chosen + rejected) ** 2 / len(pairs)
    loss.backward()
    optimizer.step()
    return float(loss.detach()), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 3, "max_tokens_per_micro_batch": 400},
        {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 400, "backend": "fsdp2"},
        {"workers": 2, "zero_stage": 1, "max_tokens_per_micro_batch": 300},
        pytest.param({"workers": 2, "zero_stage": 2, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"workers": 2, "zero_stage": 3, "sequence_parallel": 2, "max_tokens_per_micro_batch": 200},
    ],
)
def test_an_update_is_that_of_a_plain_loop_and_the_reward_scores_as_the_engine(
    resources: ResourceManager,
    float_model: Path,
    pairs: list[Pair],
    plain: tuple[float, dict[str, torch.Tensor]],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    loss, weights = plain
    card = ModelCard(name="tiny", base_model="tiny", pipeline="reward_model", steps=1)
    with ExitStack() as stack:
        trainer = engine(resources, float_model, stack, **options)
        trainer.save(tmp_path)
        trainer.train_step(pairs)  # away from where the checkpoint was taken, and back
        trainer.load(tmp_path)
        measured = reduce(trainer.measure(pairs))
        report = reduce(trainer.train_step(pairs))
        found = trained_weights(trainer.cluster)
        scored = [reduce(trainer.measure([pair])) for pair in pairs]
        model = ModelConfig(path=str(float_model))
        trainer.cluster.everywhere(TrainingRank.export, str(tmp_path / "model"), model, card)
    assert measured["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert report["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert (report["preference/pairs"], report["train/updates"]) == (5, 1)
    assert set(found) == set(weights)
    for name, parameter in weights.items():
        assert found[name].sub(parameter).abs().max() < 2e-6, name

    reward = RewardModel(RewardModelConfig(path=str(tmp_path / "model"), batch_size=3))
    for side in ("chosen", "rejected"):
        results: Any = reward.score([completion(row[side], prompt=row["prompt"]) for row in ROWS])
        expected = [figures[f"preference/score_{side}"] for figures in scored]
        assert [result.value for result in results] == pytest.approx(expected, abs=1e-4)
    assert "pipeline_tag: text-classification" in (tmp_path / "model" / "README.md").read_text()
