"""A reward model: a sequence classifier from the Hugging Face hub or a directory scores whole conversations.

- type: reward_model
  path: Skywork/Skywork-Reward-V2-Qwen3-0.6B
  squash: sigmoid
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from roll_like import Completion, Outcome, Renderer, Reward, RewardCase, RewardConfig, RewardResult, register_reward
from roll_like.errors import EnvError, RefusedAnswerError, RewardError
from roll_like.models.rotary import fix_frequencies
from roll_like.types import IntArray

if TYPE_CHECKING:
    import torch


class RewardModelConfig(RewardConfig):
    """Settings of the `reward_model` reward."""

    type: Literal["reward_model"] = "reward_model"
    path: str = Field(description="Directory or hub id of a sequence-classification model.")
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="Where it computes. Reward workers see GPUs only where they are given some.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Precision.")
    batch_size: int = Field(default=8, ge=1, description="Conversations of one forward pass.")
    max_tokens: int = Field(
        default=4096,
        ge=1,
        description="A longer conversation is lost, because a truncated one cannot be scored. Tokens.",
    )
    label: int | None = Field(
        default=None, ge=0, description="Which output counts, of a model with several; needed there, none elsewhere."
    )
    squash: Literal["none", "sigmoid"] = Field(default="none", description="What the raw score is put through first.")
    scale: float = Field(default=1.0, allow_inf_nan=False, description="Factor of the score after that.")
    shift: float = Field(default=0.0, allow_inf_nan=False, description="Added to the score after that.")
    chat_template: Path | None = Field(
        default=None, description="Jinja file that replaces the model's own chat template."
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="Further variables of the chat template, such as `enable_thinking: false`."
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")

    @property
    def model_path(self) -> str:
        """The model."""
        return self.path


@register_reward("reward_model")
class RewardModel(Reward):
    """`scale` × squashed score + `shift`; `raw` is the model's own score.

    Each reward worker loads the model once, when it starts.
    """

    Config: ClassVar[type[RewardConfig]] = RewardModelConfig
    per_sample: ClassVar[bool] = True

    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__(config)
        self._model: Any = None
        self._renderer: Renderer | None = None

    def start(self) -> None:
        """Load the model and its tokenizer.

        Raises:
            RewardError: It cannot be loaded, has no chat template, or `label` does not fit it.
        """
        if self._model is not None:
            return
        # imported here: seconds, and only this reward needs them
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        config = self.config
        if config.device.startswith("cuda") and not torch.cuda.is_available():
            raise RewardError(f"device is {config.device!r}, and this process sees no GPU", fix="set device: cpu")
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
            if config.chat_template is not None:
                tokenizer.chat_template = config.chat_template.read_text(encoding="utf-8-sig")
            model, info = AutoModelForSequenceClassification.from_pretrained(
                config.path,
                dtype=getattr(torch, config.dtype),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise RewardError(
                f"the reward model {config.path} cannot be loaded: {error}",
                fix="correct `path` (and `chat_template`) of the reward_model reward",
            ) from error
        self._check(model, tokenizer, sorted(info["missing_keys"]))
        rows = int(model.get_input_embeddings().weight.shape[0])
        self._renderer = Renderer(tokenizer, template_options=config.template_options, vocabulary=rows)
        fix_frequencies(model, config.max_tokens)
        self._model = model.to(config.device).eval()

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return a value for each completion.

        A conversation that is too long gives a `RefusedAnswerError`, one that the template refuses a `RewardError`.
        """
        self.start()
        outcomes: list[Outcome] = []
        rows: dict[int, IntArray] = {}
        for index, row in enumerate(map(self._encode, completions)):
            if isinstance(row, RewardError):
                outcomes.append(row)
                continue
            if len(row) <= self.config.max_tokens:
                rows[index] = row
            outcomes.append(
                RefusedAnswerError(
                    f"the conversation has {len(row)} tokens, above max_tokens: {self.config.max_tokens}",
                    fix="raise `max_tokens` of the reward_model reward, or lower rollout.max_response_tokens",
                )
            )
        # neighbours of equal length need little padding
        fitting = sorted(rows, key=lambda index: len(rows[index]))
        size = self.config.batch_size if self._model.config.pad_token_id is not None else 1
        for start in range(0, len(fitting), size):
            batch = fitting[start : start + size]
            for index, raw in zip(batch, self._forward([rows[index] for index in batch]), strict=True):
                outcomes[index] = self._outcome(raw)
        return outcomes

    def cases(self) -> Sequence[RewardCase]:
        """Return a question whose right answer should score above others; how high, every model has its own scale."""
        return (
            RewardCase(
                prompt="What is the capital of France?",
                answer="Paris",
                gold=("The capital of France is Paris.",),
                wrong=("The capital of France is Berlin.", "I do not want to answer that."),
                hostile=("capital capital capital capital",),
                gold_value=-math.inf,
                empty_value=math.inf,
            ),
        )

    def close(self) -> None:
        """Let go of the model."""
        self._model = self._renderer = None

    def _check(self, model: Any, tokenizer: Any, absent: Sequence[str]) -> None:
        if absent:  # transformers would go on with random numbers
            raise RewardError(
                f"the reward model {self.config.path} lacks {len(absent)} of its tensors, first {absent[0]}: it is no "
                "sequence classifier, or not a complete one",
                fix="set `path` of the reward_model reward to a reward model; to judge with a language model, use "
                "`llm_judge`",
            )
        if tokenizer.chat_template is None:
            raise RewardError(
                f"the reward model {self.config.path} has no chat template, so its form of a conversation is unknown",
                fix="set `chat_template` to the Jinja file that it was trained with",
            )
        outputs = int(model.config.num_labels)
        label = self.config.label
        if (label is None and outputs != 1) or (label is not None and label >= outputs):
            raise RewardError(
                f"the reward model {self.config.path} has {outputs} outputs, and label is {label}",
                fix=f"set label to one of 0 to {outputs - 1}" if outputs > 1 else "remove label",
            )

    def _encode(self, completion: Completion) -> IntArray | RewardError:
        """Return the tokens of the prompt and the response (or all turns), written by the chat template, shape [T]."""
        assert self._renderer is not None
        # what an episode's environment said last is answered by no turn, and the model scores the end
        unanswered = len(completion.turns[-1].after) if completion.turns else 0
        messages = completion.conversation[: len(completion.conversation) - unanswered]
        try:
            # an answer that spells the end of its turn must not write the user's next one
            text = self._renderer.render(messages, (), generation_prompt=False, foreign_answers=True)
            return self._renderer.encode(text)
        except EnvError as error:
            return RewardError(
                f"the reward model {self.config.path}: {error.message}",
                fix="change the messages of the prompt, or `chat_template` (or `template_options`) of the reward_model "
                "reward",
            )

    def _forward(self, rows: Sequence[IntArray]) -> list[float]:
        """Return the raw scores of conversations [B], padded on the right to the longest."""
        import torch

        pad = self._model.config.pad_token_id
        longest = max(len(row) for row in rows)
        ids_BL = torch.tensor([[*row, *[pad or 0] * (longest - len(row))] for row in rows], device=self.config.device)
        mask_BL = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self.config.device)
        with torch.inference_mode():
            scores_BC: torch.Tensor = self._model(input_ids=ids_BL, attention_mask=mask_BL).logits
        return [float(score) for score in scores_BC[:, self.config.label or 0].float()]

    def _outcome(self, raw: float) -> Outcome:
        if not math.isfinite(raw):
            return RewardError(f"the reward model gave {raw}", fix="try another `dtype`")
        value = _sigmoid(raw) if self.config.squash == "sigmoid" else raw
        return RewardResult(self.config.scale * value + self.config.shift, {"raw": raw})


def _sigmoid(value: float) -> float:
    """1 / (1 + e^−value), without overflow."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
