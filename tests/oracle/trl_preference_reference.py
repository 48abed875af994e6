"""TRL 1.16: `DPOTrainer`, `KTOTrainer`, and the experimental `CPOTrainer` and `ORPOTrainer`.

A trainer is made without `__init__`, so that there is no model, data or accelerator; what the compared methods read is
set by hand. Models are replaced by log-probabilities that are already there: those of `DPOTrainer` and `KTOTrainer` may
return them as they are, those of the other two return logits, here of a vocabulary of "this token" and "another". A
prompt has one token, of which no model foretells anything. The compared code is TRL's, unchanged: `_compute_loss`,
`get_batch_loss_metrics` and `cpo_loss`.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from oracle_imports import references
from torch import Tensor

with references():
    from trl.experimental.cpo import cpo_trainer
    from trl.experimental.orpo import orpo_trainer
    from trl.trainer import dpo_trainer, kto_trainer

__all__ = [
    "cpo_loss",
    "cpo_loss_of_log_ratios",
    "dpo_figures",
    "dpo_loss",
    "kto_loss",
    "kto_mismatched",
    "orpo_loss",
]

#: A single process: what is gathered over processes is what this one has.
ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor
)


class _Given:
    """A trainer without `__init__`, and with the settings that all of them read."""

    def __init__(self, **attributes: Any) -> None:
        self.accelerator = ACCELERATOR
        self.model = SimpleNamespace(training=True)
        self.aux_loss_enabled = False
        self.precompute_ref_logps = True
        self.is_encoder_decoder = False
        self.label_smoothing = 0.0
        self._metrics: Any = {"train": defaultdict(list)}
        self._total_train_tokens, self._tp_size = 0, 1
        self.__dict__.update(attributes)

    def concatenated_inputs(self, batch: Any, **_: Any) -> Any:
        return batch["given"]


class _DPO(_Given, dpo_trainer.DPOTrainer):
    pass


class _KTO(_Given, kto_trainer.KTOTrainer):
    pass


class _CPO(_Given, cpo_trainer.CPOTrainer):
    pass


class _ORPO(_Given, orpo_trainer.ORPOTrainer):
    pass


def dpo_loss(
    case: Any,
    *losses: str,
    weights: list[float] | None = None,
    divergence: tuple[str, float] = ("reverse_kl", 0.5),
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient [B, T] of `DPOTrainer._compute_loss`, with one or several loss types."""
    logprobs_BT = case.logprobs_BT.to(dtype, copy=True).requires_grad_()
    loss, _ = _dpo(case, logprobs_BT, losses, weights, divergence, settings)
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def dpo_figures(case: Any, *losses: str, **settings: Any) -> dict[str, float]:
    """What `DPOTrainer` logs."""
    _, trainer = _dpo(case, case.logprobs_BT, losses, None, ("reverse_kl", 0.5), settings)
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def _dpo(
    case: Any,
    logprobs_BT: Tensor,
    losses: tuple[str, ...],
    weights: list[float] | None,
    divergence: tuple[str, float],
    settings: dict[str, Any],
) -> tuple[Tensor, Any]:
    trainer = _DPO(
        loss_types=losses,
        loss_weights=weights or [1.0] * len(losses),
        f_divergence_type=divergence[0],
        f_alpha_divergence_coef=divergence[1],
        use_weighting=False,
        ld_alpha=None,
        **settings,
    )
    reference_chosen_P, reference_rejected_P = case.reference_B.to(logprobs_BT.dtype).chunk(2)
    mask_BT = _with_prompt(case.mask_BT)
    inputs = {
        "input_ids": torch.zeros_like(mask_BT),
        "attention_mask": mask_BT,
        "completion_mask": mask_BT - _prompt(mask_BT),
        "ref_chosen_logps": reference_chosen_P,
        "ref_rejected_logps": reference_rejected_P,
    }
    return trainer._compute_loss(
        lambda **_: _outputs(logprobs_BT * case.mask_BT.to(logprobs_BT.dtype)), inputs, False
    ), trainer


class _Rows(list[dict[str, Any]]):
    """A dataset of a few rows, as far as `KTOTrainer` asks of it."""

    def map(self, function: Any, *, batched: bool = False, batch_size: int = 1, fn_kwargs: Any = None) -> _Rows:
        if not batched:
            return _Rows({**row, **function(dict(row), **(fn_kwargs or {}))} for row in self)
        made = _Rows()
        for start in range(0, len(self), batch_size):
            rows = self[start : start + batch_size]
            columns = function({key: [row[key] for row in rows] for key in rows[0]})
            made += [{key: columns[key][at] for key in columns} for at in range(len(rows))]
        return made


def kto_mismatched(rows: list[tuple[str, str]], batch_size: int) -> list[tuple[str, str]]:
    """Prompts and the completions that `KTOTrainer` puts after them for its baseline; a letter is a token."""
    trainer = _KTO(calculate_KL=True, _tokenizer=SimpleNamespace(eos_token="."))
    args: Any = SimpleNamespace(max_length=None, per_device_train_batch_size=batch_size)
    dataset: Any = _Rows({"prompt": prompt, "completion": completion, "label": True} for prompt, completion in rows)
    tokenizer: Any = lambda text, **_: {"input_ids": [ord(letter) for letter in text]}  # noqa: E731 - called so
    made = trainer._prepare_dataset(dataset, tokenizer, args, "evaluation")
    return [tuple("".join(map(chr, row[key])) for key in ("prompt_ids", "KL_completion_ids")) for row in made]


def kto_loss(case: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient [B, T] of `KTOTrainer._compute_loss`."""
    logprobs_BT = case.logprobs_BT.clone().requires_grad_()
    trainer = _KTO(loss_type="kto", calculate_KL=True, **settings)
    mask_BT, other_mask_BT = _with_prompt(case.mask_BT), _with_prompt(case.other_mask_BT)
    inputs = {
        "input_ids": torch.zeros_like(mask_BT),
        "attention_mask": mask_BT,
        "completion_mask": mask_BT - _prompt(mask_BT),
        "KL_input_ids": torch.ones_like(other_mask_BT),  # tells the two apart
        "KL_attention_mask": other_mask_BT,
        "KL_completion_mask": other_mask_BT - _prompt(other_mask_BT),
        "label": case.desirable_B,
        "ref_logps": case.reference_B,
        "ref_KL_logps": case.other_reference_B,
    }

    def model(*, input_ids: Tensor, **_: Any) -> Any:
        mismatched = bool(input_ids[0, 0])
        return _outputs(case.other_logprobs_BT * case.other_mask_BT if mismatched else logprobs_BT * case.mask_BT)

    loss = trainer._compute_loss(model, inputs, False)
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def cpo_loss(case: Any, loss_type: str, *, nll: float = 0.0, gamma: float = 0.0, **settings: Any) -> Any:
    """Loss and gradient [B, T] of `CPOTrainer.get_batch_loss_metrics`."""
    trainer = _CPO(loss_type=loss_type, cpo_alpha=nll, simpo_gamma=gamma, alpha=0.0, pad_token_id=0, **settings)
    return _of_logits(trainer, case)


def orpo_loss(case: Any, *, prompt_logprob: float | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient [B, T] of `ORPOTrainer.get_batch_loss_metrics`; prompts may have one more token."""
    return _of_logits(_ORPO(padding_value=0, **settings), case, prompt_logprob)


def cpo_loss_of_log_ratios(case: Any, loss_type: str, **settings: Any) -> tuple[Tensor, Tensor]:
    """Mean loss and gradient [B, T] of `CPOTrainer.cpo_loss`, given log-ratios for log-probabilities."""
    logprobs_BT = case.logprobs_BT.clone().requires_grad_()
    trainer = _CPO(loss_type=loss_type, alpha=0.0, **settings)
    chosen_P, rejected_P = ((logprobs_BT * case.mask_BT).sum(1) - case.reference_B).chunk(2)
    loss = trainer.cpo_loss(chosen_P, rejected_P)[0].mean()
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def _of_logits(trainer: Any, case: Any, prompt_logprob: float | None = None) -> tuple[Tensor, Tensor]:
    logprobs_BT = case.logprobs_BT.clone().requires_grad_()
    labelled_BT, tokens_BT, mask_BT = logprobs_BT, case.mask_BT, _with_prompt(case.mask_BT)
    if prompt_logprob is not None:
        labelled_BT = torch.cat([torch.full_like(logprobs_BT[:, :1], prompt_logprob), logprobs_BT], 1)
        tokens_BT = torch.cat([torch.zeros_like(tokens_BT[:, :1]), tokens_BT], 1)
        mask_BT = _with_prompt(mask_BT)
    logits_BTV = torch.stack([labelled_BT, torch.log(-torch.expm1(labelled_BT))], -1)
    # a token's logits stand at the one before it; those of the last token foretell nothing
    logits_BTV = torch.cat([logits_BTV, torch.zeros_like(logits_BTV[:, :1])], 1)
    labels_BT = torch.where(_with_prompt(tokens_BT) - _prompt(mask_BT) > 0, 0, -100)
    batch = {
        "chosen_labels": labels_BT[: len(labels_BT) // 2],
        "given": {
            "concatenated_input_ids": torch.zeros_like(labels_BT),
            "concatenated_attention_mask": mask_BT,
            "concatenated_labels": labels_BT,
        },
    }
    loss, _ = trainer.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits_BTV), batch)
    return loss, torch.autograd.grad(loss, logprobs_BT)[0]


def _with_prompt(mask_BT: Tensor) -> Tensor:
    """With one token of a prompt before every response."""
    return torch.cat([torch.ones_like(mask_BT[:, :1]), mask_BT], 1).long()


def _prompt(mask_BT: Tensor) -> Tensor:
    only_BT = torch.zeros_like(mask_BT)
    only_BT[:, 0] = 1
    return only_BT


def _outputs(logprobs_BT: Tensor) -> Any:
    """What TRL's models return: log-probabilities, and figures that are only logged."""
    zeros_BT = torch.zeros_like(logprobs_BT)
    return SimpleNamespace(
        log_probs=logprobs_BT,
        entropy=zeros_BT,
        mean_logits=zeros_BT,
        is_top1=torch.zeros_like(zeros_BT, dtype=torch.bool),
    )
