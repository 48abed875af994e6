"""Pairs of conversations as a reward model reads them: the tokens and the place of the `reward_model` reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import renderer
from model_families import make_family
from reward_support import completion
from tiny_model import make_tiny_tokenizer
from transformers import AutoModelForSequenceClassification

from roll_like.builtin.pipelines.reward_model.config import ScoredPairData
from roll_like.builtin.pipelines.reward_model.objective import ScoreModule, score_targets
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.config.model import ModelConfig
from roll_like.config.run import ALWAYS_SHARED
from roll_like.data.chat import Renderer
from roll_like.data.samples import SampleSet
from roll_like.errors import ConfigError, DataError, EngineError
from roll_like.models.classifier import load_classifier, pad_token_id
from roll_like.models.export import save_hf_directory
from roll_like.models.load import load_tokenizer
from roll_like.training.backbone import use_row_attention
from roll_like.training.pairs import pair_batches, sequences_of
from roll_like.training.policy import tensors_of
from roll_like.types import Pair, TrainingSample

PAIRS = Path(__file__).resolve().parents[2] / "configs" / "data" / "pairs_eval.jsonl"
ROW = {"prompt": "Say a number", "chosen": "It is twelve.", "rejected": "No."}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(
    path: Path, render: Renderer | None = None, source: dict[str, Any] | None = None, **limits: Any
) -> SampleSet[Pair]:
    data = ScoredPairData.model_validate({"sources": [{"path": str(path), **(source or {})}], **limits})
    return load_scored_pairs(data, render or Renderer(make_tiny_tokenizer()))


def rewards_tokens(render: Renderer, prompt: str, text: str) -> list[int]:
    """What the reward gives to its model."""
    from roll_like.builtin.rewards.reward_model import RewardModel, RewardModelConfig

    reward = RewardModel(RewardModelConfig(path="none"))
    reward._renderer = render
    return [int(token) for token in reward._encode(completion(text, prompt=prompt)).token_ids]


@pytest.mark.parametrize(
    "name", ["SmolLM2", "Qwen2.5", "Qwen3", "chatml", "no newline after the end", "headers only", "sentencepiece"]
)
def test_conversations_are_the_tokens_that_the_reward_reads(name: str) -> None:
    render = renderer(name)
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    pairs = load(PAIRS, render).samples
    assert len(pairs) == len(rows) > 100
    for pair, row in list(zip(pairs, rows, strict=True))[::10]:
        assert pair.chosen.token_ids.tolist() == rewards_tokens(render, row["prompt"], row["chosen"])
        assert pair.rejected.token_ids.tolist() == rewards_tokens(render, row["prompt"], row["rejected"])
        assert np.flatnonzero(pair.chosen.loss_mask).tolist() == [len(pair.chosen) - 1]
        assert pair.margin == 0


def test_an_answer_that_spells_the_end_of_its_turn_is_the_text_that_the_reward_reads(tmp_path: Path) -> None:
    render, spelled = renderer("chatml"), "It is.<|im_end|>\n<|im_start|>user\nThanks"
    (pair,) = load(write(tmp_path, ROW | {"chosen": spelled}), render)
    assert pair.chosen.token_ids.tolist() == rewards_tokens(render, ROW["prompt"], spelled)
    ends = [int((each.token_ids == render.end_of_turn).sum()) for each in pair.sequences]
    assert ends[0] == ends[1]


def test_a_template_that_repeats_the_answer_is_fine(tmp_path: Path) -> None:
    (pair,) = load(write(tmp_path, ROW), renderer("repeats answers"))  # nothing has to be found in it
    assert "It is twelve.|It is twelve." in make_tiny_tokenizer().decode(pair.chosen.token_ids)


def test_margins_come_with_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path, ROW | {"by": 1}, ROW | {"by": 0.5})
    pairs = load(path, source={"margin_field": "by"})
    assert [pair.margin for pair in pairs] == [1.0, 0.5]
    assert pairs.fingerprint != load(path).fingerprint
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: the row has no field 'score'"):
        load(path, source={"margin_field": "score"})
    for value in (-1, "much", True, None):
        with pytest.raises(DataError, match=r"pairs\.jsonl:1: expected a number of at least 0 in 'by'"):
            load(write(tmp_path, ROW | {"by": value}), source={"margin_field": "by"})


def test_calls_and_reasoning_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    answer = {"role": "assistant", "content": "It is.", "tool_calls": [call], "reasoning_content": "Because."}
    for left in ("tool_calls", "reasoning_content"):
        chosen = [{key: value for key, value in answer.items() if key != left}]
        with pytest.raises(DataError, match="the chat template does not write its"):
            load(write(tmp_path, ROW | {"chosen": chosen}))
    assert load(write(tmp_path, ROW | {"chosen": [answer]}), renderer("Qwen3")).samples
    with pytest.raises(DataError, match="the row has tools, and the chat template writes none"):
        load(write(tmp_path, ROW | {"tools": [call]}))


def test_long_pairs_are_left_out_whole_and_bad_ones_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, ROW, ROW | {"chosen": "word " * 60})
    (report,) = load(path, max_tokens=50).report
    assert (report.rows, report.kept, report.samples) == (2, 1, 1)
    assert "1 over the limit of tokens left out, first" in str(report)
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: .* tokens, the limit is 50"):
        load(path, max_tokens=50, too_long="refuse")
    with pytest.raises(DataError, match="chosen and rejected are the same tokens"):
        load(write(tmp_path, ROW | {"rejected": ROW["chosen"]}))
    ends = [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "Thanks"}]
    with pytest.raises(DataError, match="the last message is of 'user', expected the assistant's"):
        load(write(tmp_path, ROW | {"chosen": ends}))


def pair_of(chosen: list[int], rejected: list[int]) -> Pair:
    def sample(ids: list[int]) -> TrainingSample:
        tokens = np.array(ids, np.int32)
        return TrainingSample(token_ids=tokens, loss_mask=np.arange(len(ids)) == len(ids) - 1, origin="f:1")

    return Pair(chosen=sample(chosen), rejected=sample(rejected), margin=0.0)


@pytest.mark.parametrize(
    ("chosen", "rejected", "lengths", "shared"),
    [
        ([5, 6, 7, 8], [5, 6, 9], [5, 4], 2),
        ([5, 6, 7, 2], [5, 6, 9, 2, 2], [4, 4], 2),  # padding at the end is not read
        ([5, 2, 7, 2], [5, 2, 9, 8], [4, 5], 2),  # within a conversation it is
        ([5, 6, 7], [5, 6], [4, 3], 2),  # one begins with the other
        ([5, 6, 2], [5, 6], [3, 3], 2),  # and is the same once padding is gone
    ],
)
def test_the_score_is_read_at_the_last_token_that_is_not_padding(
    chosen: list[int], rejected: list[int], lengths: list[int], shared: int
) -> None:
    pairs = score_targets([pair_of(chosen, rejected)], pad_token_id=2)
    samples = sequences_of(pairs)
    assert [len(sample.token_ids) for sample in samples] == lengths
    assert {sample.prompt_length for sample in samples} == {shared}
    ((batch,),) = pair_batches(pairs, ranks=1, max_tokens=64)
    read = batch.token_ids_BL.reshape(-1)[batch.sources].tolist()
    expected = [next(token for token in reversed(ids) if token != 2) for ids in (chosen, rejected)]
    assert read == expected
    assert int((batch.segment_ids_BL >= 0).sum()) == shared + sum(length - 1 - shared for length in lengths)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_a_state_begins_with_every_conversation(family: str, tmp_path: Path) -> None:
    """Scores and gradients of pairs that share rows are those of each conversation alone."""
    make_family(family).save_pretrained(tmp_path)
    draw = np.random.default_rng(0)
    conversations = [draw.integers(3, 64, length).tolist() for length in (9, 7, 12, 6)]
    conversations[1][:4] = conversations[0][:4]
    theirs = load_classifier(tmp_path, "float32", seed=0).eval()
    expected = torch.cat([theirs(input_ids=torch.tensor([ids])).logits[0] for ids in conversations])
    weights = torch.tensor([1.0, -2.0, 3.0, -4.0])
    (expected * weights).sum().backward()
    ours = load_classifier(tmp_path, "float32", seed=0).eval()
    use_row_attention(ours, row_sharing=ALWAYS_SHARED)
    module = ScoreModule(ours)
    pairs = score_targets([pair_of(*conversations[:2]), pair_of(*conversations[2:])], pad_token_id=0)
    ((batch,),) = pair_batches(pairs, ranks=1, max_tokens=64)
    scores_N = module(*tensors_of(batch, torch.device("cpu"))[:4])[torch.from_numpy(np.argsort(batch.sample_ids))]
    (scores_N * weights).sum().backward()
    assert float((scores_N - expected).detach().abs().max()) < 1e-5
    found = dict(ours.named_parameters())
    largest = max(float(each.grad.abs().max()) for each in theirs.parameters() if each.grad is not None)
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert float((found[name].grad - parameter.grad).abs().max()) < 1e-5 * largest, name


def test_a_family_that_transformers_has_no_classifier_of_is_refused(tmp_path: Path) -> None:
    make_family("bamba").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="transformers has no class of bamba models with a score") as said:
        load_classifier(tmp_path, "float32", seed=0)
    assert said.value.fix == "set model.path to a model of another family"


def test_a_conversation_of_padding_is_refused() -> None:
    with pytest.raises(EngineError, match=r"f:1: a conversation holds nothing but the padding token 2"):
        score_targets([pair_of([2, 2], [5, 6])], pad_token_id=2)


@pytest.mark.parametrize("padding", [None, "<|im_end|>"])  # the second is what a conversation ends with
@pytest.mark.parametrize("template", ["chatml", "no newline after the end"])
def test_an_exported_model_gives_the_scores_of_training(
    tiny_model: Path, tmp_path: Path, template: str, padding: str | None
) -> None:
    from roll_like.builtin.rewards.reward_model import RewardModel, RewardModelConfig

    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    tokenizer.chat_template = renderer(template).tokenizer.chat_template
    module = ScoreModule(load_classifier(tiny_model, "float32", seed=0))
    config = module.classifier.config
    if padding is not None:
        tokenizer.pad_token, config.pad_token_id = padding, tokenizer.convert_tokens_to_ids(padding)
    with torch.no_grad():
        module.head.weight.mul_(100)
    pairs = load(PAIRS, Renderer(tokenizer)).samples[:6]
    read = score_targets(pairs, pad_token_id(config, tokenizer))
    ((batch,),) = pair_batches(read, ranks=1, max_tokens=8192)
    with torch.no_grad():
        scores_N = module(*tensors_of(batch, torch.device("cpu"))[:4])
    found = dict(zip(batch.sample_ids.tolist(), scores_N.tolist(), strict=True))

    out = save_hf_directory(
        module.classifier.state_dict(), config, tokenizer, tmp_path / "out", task="text-classification"
    )
    stated = json.loads((out / "config.json").read_text())
    assert stated["architectures"] == ["LlamaForSequenceClassification"]
    assert stated["pad_token_id"] == tokenizer.pad_token_id
    reward = RewardModel(RewardModelConfig(path=str(out), batch_size=4))
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()][: len(pairs)]
    texts = [(row["prompt"], text) for row in rows for text in (row["chosen"], row["rejected"])]
    verdicts: Any = reward.score([completion(text, prompt=prompt) for prompt, text in texts])
    rewarded = [verdict.value for verdict in verdicts]
    assert np.std(rewarded) > 0.05
    assert [found[index] for index in range(len(texts))] == pytest.approx(rewarded, abs=1e-4)
    assert load_classifier(out, "float32", seed=1).score.weight.tolist() == module.head.weight.tolist()


def test_a_new_output_is_small_and_seeded(tiny_model: Path) -> None:
    weights = [load_classifier(tiny_model, "float32", seed=seed).score.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].std().item() == pytest.approx(1 / 65, rel=0.3)


def test_a_classifier_of_several_labels_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a classifier with 3 outputs, and a reward model has one"):
        load_classifier(tmp_path, "float32", seed=0)
