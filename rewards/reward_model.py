"""A reward model from the Hugging Face hub or a directory: it scores whole conversations, or the steps of answers.

- type: reward_model
  path: Skywork/Skywork-Reward-V2-Qwen3-0.6B
  squash: sigmoid
- type: reward_model
  path: runs/reward_model_steps/model
  steps: {reduce: min}

A sequence classifier scores conversations. A process reward model scores steps: a token classifier, or a model of its
own code with an output at every token. With two outputs the second says that the step is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from roll_like import (
    Completion,
    Outcome,
    Renderer,
    Reward,
    RewardCase,
    RewardConfig,
    RewardResult,
    StepScore,
    register_reward,
)
from roll_like.builtin.rewards.process_steps import (
    REDUCED,
    ScoredRow,
    StepsConfig,
    filled_in,
    in_steps,
    scores_steps,
)
from roll_like.errors import EnvError, RefusedAnswerError, RewardError
from roll_like.models.rotary import fix_frequencies

if TYPE_CHECKING:
    import torch


class RewardModelConfig(RewardConfig):
    """Settings of the `reward_model` reward."""

    type: Literal["reward_model"] = "reward_model"
    path: str = Field(description="Directory or hub id of a sequence classifier, or of a process reward model.")
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
        default=None,
        ge=0,
        description="Which output counts, of a classifier of conversations with several; needed there, none elsewhere.",
    )
    squash: Literal["none", "sigmoid"] | None = Field(
        default=None,
        description="What a raw score is put through first; default: `sigmoid` for steps, unless the model's "
        "config.json says `problem_type: regression`; else `none`.",
    )
    scale: float = Field(default=1.0, allow_inf_nan=False, description="Factor of the score after that.")
    shift: float = Field(default=0.0, allow_inf_nan=False, description="Added to the score after that.")
    steps: StepsConfig | None = Field(
        default=None,
        description="Of a process reward model: how answers are split into steps, and scores of steps become one.",
    )
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

    Of a process reward model the squashed scores of steps are reduced to one first, and each step has a score of its
    own beside it. Each reward worker loads the model once, when it starts.
    """

    Config: ClassVar[type[RewardConfig]] = RewardModelConfig
    per_sample: ClassVar[bool] = True

    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__(config)
        self._model: Any = None
        self._renderer: Renderer | None = None
        self._steps: StepsConfig | None = None

    def start(self) -> None:
        """Load the model and its tokenizer.

        Raises:
            RewardError: It cannot be loaded, has no chat template, or `label` or `steps` do not fit it.
        """
        if self._model is not None:
            return
        # imported here: seconds, and only this reward needs them
        import torch
        from transformers import AutoConfig, AutoTokenizer

        config = self.config
        if config.device.startswith("cuda") and not torch.cuda.is_available():
            raise RewardError(f"device is {config.device!r}, and this process sees no GPU", fix="set device: cpu")
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
            if config.chat_template is not None:
                tokenizer.chat_template = config.chat_template.read_text(encoding="utf-8-sig")
            shape = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
            model, info = _auto_class(shape, config).from_pretrained(
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
        self._steps = filled_in(shape, config.path, config.steps)
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
        rows: dict[int, ScoredRow] = {}
        for index, row in enumerate(map(self._encode, completions)):
            if isinstance(row, RewardError):
                outcomes.append(row)
                continue
            if len(row.token_ids) <= self.config.max_tokens:
                rows[index] = row
            outcomes.append(
                RefusedAnswerError(
                    f"the conversation has {len(row.token_ids)} tokens, above max_tokens: {self.config.max_tokens}",
                    fix="raise `max_tokens` of the reward_model reward, or lower rollout.max_response_tokens",
                )
            )
        # neighbours of equal length need little padding
        fitting = sorted(rows, key=lambda index: len(rows[index].token_ids))
        # what reads the last token that is no padding has to know that token
        alone = self._steps is None and self._model.config.pad_token_id is None
        size = 1 if alone else self.config.batch_size
        for start in range(0, len(fitting), size):
            batch = fitting[start : start + size]
            for index, raws in zip(batch, self._forward([rows[index] for index in batch]), strict=True):
                outcomes[index] = self._outcome(raws, rows[index])
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
        self._model = self._renderer = self._steps = None

    def _check(self, model: Any, tokenizer: Any, absent: Sequence[str]) -> None:
        if absent:  # transformers would go on with random numbers
            raise RewardError(
                f"the reward model {self.config.path} lacks {len(absent)} of its tensors, first {absent[0]}: it is no "
                "classifier, or not a complete one",
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
        if scores_steps(model.config):
            if label is not None or outputs > 2:
                raise RewardError(
                    f"the process reward model {self.config.path} has {outputs} outputs, and label is {label}; one or "
                    "two were expected, of which the second says that a step is right",
                    fix="remove label" if outputs <= 2 else "set `path` to another model",
                )
        elif (label is None and outputs != 1) or (label is not None and label >= outputs):
            raise RewardError(
                f"the reward model {self.config.path} has {outputs} outputs, and label is {label}",
                fix=f"set label to one of 0 to {outputs - 1}" if outputs > 1 else "remove label",
            )

    def _encode(self, completion: Completion) -> ScoredRow | RewardError:
        """Return the tokens of the prompt and the response (or all turns), as the chat template writes them."""
        renderer = self._renderer
        assert renderer is not None
        # what an episode's environment said last is answered by no turn, and the model scores the end
        unanswered = len(completion.turns[-1].after) if completion.turns else 0
        messages = completion.conversation[: len(completion.conversation) - unanswered]
        try:
            if self._steps is not None:
                return in_steps(renderer, completion, messages[:-1], self._steps)
            # an answer that spells the end of its turn must not write the user's next one
            text = renderer.render(messages, (), generation_prompt=False, foreign_answers=True)
            return ScoredRow(renderer.encode(text))
        except EnvError as error:
            return RewardError(
                f"the reward model {self.config.path}: {error.message}",
                fix="change the messages of the prompt, or `chat_template` (or `template_options`) of the reward_model "
                "reward",
            )

    def _forward(self, rows: Sequence[ScoredRow]) -> list[list[float]]:
        """Return the raw scores of each conversation, or of its steps; rows are padded on the right to the longest."""
        import torch

        device = self.config.device
        pad = getattr(self._model.config, "pad_token_id", None) or 0
        tokens = [row.token_ids for row in rows]
        longest = max(map(len, tokens))
        ids_BL = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in tokens], device=device)
        mask_BL = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in tokens], device=device)
        with torch.inference_mode():
            found = self._model(input_ids=ids_BL, attention_mask=mask_BL)
        outputs: torch.Tensor = (found[0] if isinstance(found, tuple) else found.logits).float()
        if self._steps is None:
            return [[float(score)] for score in outputs[:, self.config.label or 0]]
        # of two outputs the log-odds of the second: its sigmoid is their softmax
        scores_BL = outputs[..., -1] - outputs[..., 0] if outputs.shape[-1] == 2 else outputs[..., 0]
        return [scores_L[list(row.places or ())].tolist() for row, scores_L in zip(rows, scores_BL, strict=True)]

    def _outcome(self, raws: Sequence[float], row: ScoredRow) -> Outcome:
        bad = next((raw for raw in raws if not math.isfinite(raw)), None)
        if bad is not None:
            return RewardError(f"the reward model gave {bad}", fix="try another `dtype`")
        config = self.config
        scores = [_sigmoid(raw) if self._squash == "sigmoid" else raw for raw in raws]

        def scaled(score: float) -> float:
            return config.scale * score + config.shift

        if self._steps is None:
            return RewardResult(scaled(scores[0]), {"raw": raws[0]})
        steps = [StepScore(scaled(score), end) for score, end in zip(scores, row.ends, strict=True)]
        details = {"steps": float(len(scores)), "lowest_step": min(scores)}
        return RewardResult(scaled(REDUCED[self._steps.reduce](scores)), details, steps=steps)

    @property
    def _squash(self) -> str:
        if self.config.squash is not None or self._steps is None:
            return self.config.squash or "none"
        return "none" if getattr(self._model.config, "problem_type", None) == "regression" else "sigmoid"


def _auto_class(shape: Any, config: RewardModelConfig) -> Any:
    """Return the class of transformers that loads a model.

    Raises:
        RewardError: `steps` is set, and it has no output at every token.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

    if not scores_steps(shape):
        if config.steps is None:
            return AutoModelForSequenceClassification
        raise RewardError(
            f"the reward model {config.path} ({', '.join(shape.architectures or ['of no architecture'])}) scores whole "
            "conversations, and `steps` is set",
            fix="remove `steps`, or set `path` to a process reward model (…ForTokenClassification, "
            "…ForProcessRewardModel)",
        )
    own_code = any(name.endswith("ForProcessRewardModel") for name in shape.architectures)
    return AutoModel if own_code else AutoModelForTokenClassification


def _sigmoid(value: float) -> float:
    """1 / (1 + e^−value), without overflow."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
