"""Ranks that share rows compute what one rank computes: values on every rank, gradients together.

The ranks are threads here, with their collectives over shared memory; `tests/integration/test_training_engine.py` has
processes and gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from model_families import ATTENDING, CAPPED, make_family
from transformers import AutoConfig

from roll_like.errors import ConfigError
from roll_like.models.attention import refuse_undivided_heads
from roll_like.models.renames import recompute_activations
from roll_like.training.backbone import use_row_attention
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.training.sequence_parallel import OwnTargets, SequenceParallel
from roll_like.types import TrainingSample

MAKING = threading.Lock()  # random weights come from the process's one generator


class Threads:
    """A process group whose ranks are threads: every collective waits for all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size
        self.local = threading.local()

    def all_given(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What all ranks give at this point."""
        self.given[self.local.rank] = tensor.detach().clone()
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything

    def run(self, work: Callable[[SequenceParallel], Any]) -> list[Any]:
        """Run something on all ranks; return what came of it, by rank."""

        def of(rank: int) -> Any:
            self.local.rank = rank
            try:
                return work(SequenceParallel(self, rank, self.size))  # type: ignore[arg-type]
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(of, range(self.size)))


@pytest.fixture(autouse=True)
def collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def all_to_all_single(output: torch.Tensor, given: torch.Tensor, came: None, sent: None, group: Threads) -> None:
        assert came is sent is None, "all get equally many"
        assert output.is_contiguous()
        assert given.is_contiguous()
        output.copy_(torch.stack([blocks[group.local.rank] for blocks in group.all_given(given)]))

    def all_reduce(tensor: torch.Tensor, group: Threads) -> None:
        tensor.copy_(torch.stack(group.all_given(tensor)).sum(0))

    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def samples() -> list[TrainingSample]:
    """Two prompts with three responses each; with four ranks some have tokens of prompts only."""
    random = np.random.default_rng(0)
    made = []
    for group, length in enumerate((23, 6)):
        prompt = random.integers(3, 64, length)
        for response in (7, 1, 4):
            tokens = np.concatenate([prompt, random.integers(3, 64, response)]).astype(np.int32)
            made.append(
                TrainingSample(
                    group_id=str(group),
                    token_ids=tokens,
                    prompt_length=length,
                    loss_mask=np.arange(len(tokens)) >= length,
                )
            )
    return made


def weights_of(batch: MicroBatch) -> torch.Tensor:
    return torch.from_numpy(np.sin(3 * batch.sample_ids + batch.target_ids)).float()


def computed(family: str, parallel: SequenceParallel | None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities and entropies of every target, and this rank's gradient of a loss that mixes targets."""
    with MAKING:
        model = make_family(family)
    use_row_attention(model, "varlen", row_sharing="training.share_prompts")
    recompute_activations(model)
    model.train()
    policy = PolicyModule(model, chunk_tokens=5, chunk_vocab=40)
    policy.parallel = parallel
    found = []
    (batches,) = micro_batches(samples(), ranks=1, max_tokens=40, share_prompts=True, joined=True)
    assert len(batches) > 1
    for batch in batches:
        logprobs_N, entropy_N = policy(*tensors_of(batch, torch.device("cpu")), 0.7)
        found += [logprobs_N.detach(), entropy_N.detach()]
        # not a sum over targets: every rank needs all log-probabilities for its gradient
        ((logprobs_N * weights_of(batch)).sum().exp() + entropy_N.square().sum()).backward()
    return found, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(family, size, marks=[] if size == 2 or family == "llama" else [pytest.mark.slow])
        for family in ATTENDING
        if family not in CAPPED
        for size in (2, 4)
    ],
)
def test_ranks_that_share_rows_compute_what_one_rank_computes(family: str, size: int) -> None:
    """Also with windows, shared prompts, fewer key heads than ranks, and ranks without targets."""
    expected, gradient = computed(family, None)
    ranks = Threads(size).run(lambda parallel: computed(family, parallel))
    for found, _ in ranks:
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    largest = max(float(each.abs().max()) for each in gradient.values())
    for name, theirs in gradient.items():
        mine = sum(own[name] for _, own in ranks if name in own)
        torch.testing.assert_close(mine, theirs, atol=2e-5 * largest, rtol=0, msg=lambda text, name=name: name + text)


def test_each_rank_has_its_own_tokens_gradient_only() -> None:
    _, gradient = computed("llama", None)
    for _, own in Threads(2).run(lambda parallel: computed("llama", parallel)):
        assert float((own["lm_head.weight"] - gradient["lm_head.weight"]).abs().max()) > 0.01


def test_tokens_of_all_heads_become_heads_of_all_tokens_and_back() -> None:
    whole_THD = torch.arange(5 * 4 * 2.0).view(5, 4, 2)

    def there_and_back(parallel: SequenceParallel) -> None:
        own = parallel.own(5)
        padded_THD = torch.nn.functional.pad(whole_THD, (0, 0, 0, 0, 0, 1))[own]
        heads_THD = parallel.to_heads(padded_THD, 5)
        torch.testing.assert_close(heads_THD, whole_THD[:, parallel.heads(4)])
        torch.testing.assert_close(parallel.to_tokens(heads_THD), padded_THD)

    Threads(2).run(there_and_back)


def test_fewer_key_heads_than_ranks_are_repeated() -> None:
    keys_TGD = torch.arange(8 * 2 * 3.0).view(8, 2, 3)

    def repeated(parallel: SequenceParallel) -> None:
        found = parallel.to_heads(keys_TGD[parallel.own(8)], 8)
        torch.testing.assert_close(found, keys_TGD[:, [parallel.rank // 2]])

    Threads(4).run(repeated)


def test_what_ranks_found_comes_together_in_tuples_and_dicts() -> None:
    places = torch.tensor([True, False, True]), torch.tensor([False, True, False])

    def whole(parallel: SequenceParallel) -> Any:
        own = OwnTargets(parallel, places[parallel.rank])
        figures = own.part(torch.tensor([1.0, 2.0, 3.0]))
        return own.whole((figures, {"rows": own.part(torch.eye(3))}))

    for figures, tables in Threads(2).run(whole):
        assert figures.tolist() == [1, 2, 3]
        assert torch.equal(tables["rows"], torch.eye(3))


def test_neighbours_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, timeout: made.append(ranks) or ranks)
    places = []
    for rank in range(6):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        parallel = SequenceParallel.of(2)
        places.append((parallel.group, parallel.rank))
    assert made == [[0, 1], [2, 3], [4, 5]] * 6  # every rank makes every group
    assert places == [([0, 1], 0), ([0, 1], 1), ([2, 3], 0), ([2, 3], 1), ([4, 5], 0), ([4, 5], 1)]


@pytest.mark.parametrize(
    ("heads", "keys", "ranks", "possible"),
    [(14, 2, 4, "1, 2, 14"), (32, 8, 3, "1, 2, 4, 8, 16, 32"), (28, 4, 8, "1, 2, 4, 28")],
)
def test_heads_that_ranks_cannot_divide_are_refused(heads: int, keys: int, ranks: int, possible: str) -> None:
    config = AutoConfig.for_model("qwen2", num_attention_heads=heads, num_key_value_heads=keys)
    with pytest.raises(ConfigError, match=rf"{heads} query heads and {keys} key heads") as said:
        refuse_undivided_heads(config, ranks)
    assert said.value.fix == f"set it to one of {possible}"
    for size in map(int, possible.split(", ")):
        refuse_undivided_heads(config, size)
