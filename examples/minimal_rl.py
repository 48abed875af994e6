"""GRPO on one page: what a step of `pipeline: rlvr` computes, without Ray, inference engines, packing and checkpoints.

    python examples/minimal_rl.py

A random Llama of 80,000 parameters learns to repeat a digit: the mean reward rises from 0.1 to 0.97 in ten
seconds on one core. The formulas are the package's own. In YAML the same is

    algorithm:
      advantage: grpo
      loss: {type: ppo, dual_clip: null}
      updates_per_step: 2
      kl: {use: loss, coefficient: 0.01}

`tests/unit/test_minimal_rl.py` gives one step's rollouts to the pipeline's own estimator and objective, and compares
advantages, losses and the norms of gradients.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from roll_like import Rewards
from roll_like.algorithms.advantages import grpo_advantages
from roll_like.algorithms.kl import divergence
from roll_like.algorithms.losses import clipped_surrogate, policy_ratio

END = 10  # the token after the ten digits
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, MAX_RESPONSE_TOKENS = 16, 8, 6
STEPS, UPDATES_PER_STEP, LEARNING_RATE, MAX_GRAD_NORM = 40, 2, 4e-3, 1.0
CLIP_LOW, CLIP_HIGH, KL_COEFFICIENT = 0.2, 0.28, 0.01


@dataclass(frozen=True)
class Rollouts:
    """Answers to prompts of one digit; the samples of a prompt (a group, G) follow each other.

    Attributes:
        tokens_BT: The digit and what was sampled after it.
        sampled_BT: Whether the policy sampled a token: all until the first END, which counts, bool.
        rewards_PG: Of each prompt's samples.
    """

    tokens_BT: Tensor
    sampled_BT: Tensor
    rewards_PG: Rewards


def make_model() -> LlamaForCausalLM:
    """Return a random model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=END + 1, pad_token_id=END, eos_token_id=END, **sizes))


def sample(model: LlamaForCausalLM, digits_P: Tensor) -> Rollouts:
    """Return several answers to each prompt, at temperature 1, with their rewards."""
    prompts_B1 = digits_P.repeat_interleave(SAMPLES_PER_PROMPT)[:, None]
    tokens_BT = model.generate(
        prompts_B1,
        do_sample=True,
        top_k=0,
        max_new_tokens=MAX_RESPONSE_TOKENS,
        attention_mask=torch.ones_like(prompts_B1),
    )
    ended_BT = (tokens_BT == END).cumsum(1) - (tokens_BT == END).long() > 0
    sampled_BT = ~ended_BT & (torch.arange(tokens_BT.shape[1]) > 0)
    right_B = ((tokens_BT == prompts_B1) & sampled_BT).sum(1) / MAX_RESPONSE_TOKENS
    return Rollouts(tokens_BT, sampled_BT, right_B.double().view(len(digits_P), -1).numpy())


def advantages(rewards_PG: Rewards) -> Tensor:
    """Return how much better each sample is than its group: (reward − mean)/std, shape [B]."""
    return torch.from_numpy(np.concatenate([grpo_advantages(rewards_G) for rewards_G in rewards_PG])).float()


def logprobs(model: LlamaForCausalLM, tokens_BT: Tensor) -> Tensor:
    """Return the log-probability of each token after those before it, shape [B, T]; 0 for the first."""
    logprobs_BTV = model(tokens_BT).logits[:, :-1].log_softmax(-1)
    return torch.nn.functional.pad(logprobs_BTV.gather(2, tokens_BT[:, 1:, None]).squeeze(2), (1, 0))


def grpo_loss(logprobs_N: Tensor, old_N: Tensor, reference_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return the mean over sampled tokens of −min(ρ·A, clip(ρ)·A) + β·KL, ρ = π/π_old."""
    objective_N = clipped_surrogate(policy_ratio(logprobs_N, old_N), advantages_N, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    return (-objective_N + KL_COEFFICIENT * divergence(logprobs_N, reference_N, "k3")).mean()


def train_step(
    model: LlamaForCausalLM, reference: LlamaForCausalLM, optimizer: torch.optim.Optimizer, rollouts: Rollouts
) -> list[tuple[float, float]]:
    """Take the optimizer steps over one step's rollouts, each over some of the groups; return losses and norms."""
    with torch.no_grad():  # of the policy that ratios compare with, before the first update; and of the first model
        old_BT, reference_BT = (logprobs(each, rollouts.tokens_BT) for each in (model, reference))
    advantages_BT = advantages(rollouts.rewards_PG)[:, None].expand_as(old_BT)
    found = []
    for rows in torch.arange(len(old_BT)).view(len(rollouts.rewards_PG), -1).tensor_split(UPDATES_PER_STEP):
        of = rows.flatten()
        sampled_BT = rollouts.sampled_BT[of]
        new_BT = logprobs(model, rollouts.tokens_BT[of])
        loss = grpo_loss(*(each[sampled_BT] for each in (new_BT, old_BT[of], reference_BT[of], advantages_BT[of])))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def main() -> None:
    """Train, and print the mean reward of each step."""
    torch.set_num_threads(1)  # faster for so small a model
    model = make_model()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(STEPS):
        rollouts = sample(model, torch.randint(0, END, (PROMPTS_PER_STEP,)))
        losses, norms = zip(*train_step(model, reference, optimizer, rollouts), strict=True)
        print(f"step {step}  reward {rollouts.rewards_PG.mean():.3f}  loss {losses[0]:+.4f}  grad norm {norms[0]:.3f}")


if __name__ == "__main__":
    main()
