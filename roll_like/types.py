"""What passes through a run, one type per stage.

    Task ─▶ Trajectory ─▶ Scored ─▶ PolicySample ─▶ ReferencedSample
    data     rollout       rewards   advantages      reference model

Each stage is its own frozen type, so that an unscored group given to an advantage
estimator is a type error instead of a missing key. Arrays are NumPy; one-dimensional
arrays over a trajectory's tokens are named with the suffix `_T` in function bodies.
"""

from __future__ import annotations

import inspect
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from roll_like.content import pixels
from roll_like.content.unicode import whole_text
from roll_like.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame
    from PIL.Image import Image
    from torch import Tensor

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
#: Experts that tokens were computed with, shape [T, layers, k]: `roll_like.data.routes`.
RouteArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

#: First seed of evaluations in environments, unless configured otherwise; training counts its seeds from 0.
EVALUATION_SEED = 1_000_000


class Message(TypedDict):
    """One chat message, as chat templates take it."""

    role: str
    content: str


class Origin(StrEnum):
    """Where the tokens of a trajectory come from."""

    SAMPLED = "sampled"  # the policy sampled them for this group
    REPLAYED = "replayed"  # an earlier policy sampled them, and its log-probabilities are known
    DEMONSTRATION = "demonstration"  # a row gives them, and nobody's log-probabilities are known


class StopReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"  # the policy ended it: end-of-sequence or a stop string
    LENGTH = "length"  # a limit cut it
    ABORTED = "aborted"  # the scheduler took it back; its tokens so far are kept


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image.

    Attributes:
        data: The encoded image: the bytes of a PNG, a JPEG, or what else Pillow reads.
        label: Its file, or what it is called where it has none.
    """

    data: bytes = field(repr=False)
    label: str

    @cached_property
    def digest(self) -> bytes:
        """Hash of its bytes."""
        return blake2b(self.data, digest_size=16).digest()

    def size(self) -> tuple[int, int]:
        """Return width and height in pixels, upright; only the beginning of most images is read.

        Raises:
            OSError: It is no image.
        """
        return pixels.size(self.data)

    def image(self) -> Image:
        """Return the image, RGB, as a model sees it when it is served: upright, on white where it is transparent.

        Raises:
            OSError: It is damaged.
        """
        return pixels.pixels(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image among tokens: the model sees its features in the place of `length` placeholders from `start` on."""

    picture: Picture
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """What a model writes before and after its reasoning; `roll_like.data.reasoning` splits responses by it.

    Attributes:
        open: Before it.
        close: After it.
        opened: Whether the prompt ended with `open`, so that the response begins within reasoning.
        final: What the model writes before its answer, if it does; what follows the last of them is the answer.
        around: What else may stand around an answer, from outside in; no part of it.
    """

    open: str = "<think>"
    close: str = "</think>"
    opened: bool = False
    final: str = ""
    around: tuple[str, ...] = ()

    @property
    def ends_messages(self) -> bool:
        """Whether `close` ends messages of every kind, so that one alone does not say that there was reasoning."""
        return self.close in self.around


#: The tags of most models.
THINK = ReasoningTags()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to solve.

    Attributes:
        task_id: Unique within a run: source name and row.
        source: Name of the data source it came from.
        domain: What it is about; decides which rewards score it.
        messages: The prompt, for people and for rewards; an image as `[image: pictures/7.png]`.
        prompt_ids: The same prompt, tokenised once by the chat template, with all placeholders of its images.
        answer: Reference answer, where the dataset has one.
        metadata: Every other field of the row.
        origin: `file:line` (or `dataset:row`), for messages about this row.
        images: The images of the prompt, in order.
        reasoning: What delimits the reasoning in responses to the prompt; None where the model does not reason.
    """

    task_id: str
    source: str
    domain: str
    messages: tuple[Message, ...]
    prompt_ids: IntArray
    answer: str | None
    metadata: Mapping[str, Any]
    origin: str
    images: tuple[PlacedImage, ...] = ()
    reasoning: ReasoningTags | None = THINK


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens `[start, end)` of a trajectory, sampled by one version of the policy."""

    start: int
    end: int
    policy_version: int

    def shifted(self, tokens: int) -> Segment:
        """Return the segment this many tokens later."""
        return Segment(start=self.start + tokens, end=self.end + tokens, policy_version=self.policy_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens `[start, end)` of a trajectory that the engine saw as one sequence.

    Attributes:
        start: First token.
        end: The token after the last one.
        prompt_length: Tokens before the first sampled one.
        observed_from: From this one of its tokens on, what is not sampled is an observation: in a history that was
            rendered again what follows the last turn. None: from the first sampled one on.
    """

    start: int
    end: int
    prompt_length: int
    observed_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of an episode, for rewards and people.

    Attributes:
        shown: Messages that the policy was shown since its last turn; with its first turn, the beginning of the
            conversation.
        text: What the policy wrote, its reasoning included.
        tokens: Tokens that it sampled.
        prompt_tokens: Tokens of its prompt, everything before included.
        reward: What the turn earned.
        state: Key of the state that it acted in.
        tool_calls: What it called: mappings with `name`, `arguments`, `result` and `error` (bool); empty without tools.
        invalid: Whether the environment found no action in it.
        began: When the request was made. Unix seconds.
        sampled: When the sample was back. Unix seconds.
        ended: When the environment was done. Unix seconds.
        after: Messages that no turn was shown any more; only of an episode's last turn.
        images: The images of `shown` and `after`, in order; in their texts each is `[image: LABEL]`.
        reasoning: What delimits the reasoning in `text`; None where the model does not reason.
    """

    shown: tuple[Mapping[str, Any], ...]
    text: str
    tokens: int
    prompt_tokens: int
    reward: float
    state: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    invalid: bool = False
    began: float
    sampled: float
    ended: float
    after: tuple[Mapping[str, Any], ...] = ()
    images: tuple[Picture, ...] = ()
    reasoning: ReasoningTags | None = THINK


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """What `top_p`, `top_k` and `min_p` left of the vocabulary when tokens were sampled: `roll_like.data.kept`.

    The token 3 was drawn from {1, 3}, the next one from the whole vocabulary, and the last one from {0, 2, 3}:

        ids = [1, 3, 0, 2, 3], counts = [2, 0, 3]

    Attributes:
        ids: The tokens that were kept, those of one sampled token after those of the one before, shape [M].
        counts: How many of them belong to each token, shape [T]; 0 where all tokens were kept, and where none was
            sampled.
    """

    ids: IntArray
    counts: IntArray

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One token-exact attempt at a task: one turn, or an episode of many.

    An episode is one sequence that grows with every turn, unless its chat template rewrote history: then it is cut, and
    its parts stand one after another in the arrays. They were sampled in contexts of their own, and share one return.

    Attributes:
        task: What was attempted.
        sample_index: Its place in the group, 0-based.
        token_ids: Prompt and response tokens, shape [T].
        sampled: True where the policy sampled the token, shape [T]; of a demonstration, where it would have to.
        logprobs: Behaviour log-probability of each sampled token in nats, 0 elsewhere, shape [T]; of a demonstration 0.
        turns: Index of the turn that sampled the token, −1 where not sampled, shape [T].
        parts: The sequences that the engine saw, in order; one, unless history was rewritten.
        segments: Which policy version sampled which tokens; none of a demonstration.
        text: The response, reasoning included, decoded once, for rewards and people; never tokenised again.
        stop_reason: Why it ended.
        record: The turns of an episode, for rewards and people; empty for single answers.
        images: The images among its tokens, in order: those of the prompt, and of an episode's later turns.
        routes: The experts that the engine computed each token with; None unless they are replayed in training.
        kept: What each token was drawn from; None where that was the whole vocabulary.
        origin: Who wrote it.
    """

    task: Task
    sample_index: int
    token_ids: IntArray
    sampled: BoolArray
    logprobs: FloatArray
    turns: IntArray
    parts: tuple[Part, ...]
    segments: tuple[Segment, ...]
    text: str
    stop_reason: StopReason
    record: tuple[TurnRecord, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    routes: RouteArray | None = None
    kept: KeptTokens | None = None
    origin: Origin = Origin.SAMPLED

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The images that were shown, in order: those of the prompt, of an episode those of its turns."""
        if self.record:
            return tuple(picture for turn in self.record for picture in turn.images)
        return tuple(image.picture for image in self.images)

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        return int(self.sampled.sum())

    @property
    def last_text(self) -> str:
        """What rewards see as everything that was sampled; of an episode the last turn."""
        return self.record[-1].text if self.record else self.text

    @property
    def policy_version(self) -> int:
        """Oldest policy version among its segments; 0 of a demonstration."""
        return min((segment.policy_version for segment in self.segments), default=0)


@dataclass(frozen=True, slots=True)
class StepScore:
    """What one step of an answer earned.

    Attributes:
        value: Its score.
        end: Characters of everything that was sampled (`Completion.full_text`) up to the step's end.
    """

    value: float
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A trajectory with its results.

    Attributes:
        trajectory: What was scored.
        reward: Weighted sum of `rewards`.
        rewards: Each reward's own value, by its name in the configuration.
        details: Figures that a reward reports beside its value (`ifeval/strict`), for metrics.
        weights: The weight of each reward in the sum, by the same names.
        turn_rewards: What each turn earned, in order; their sum is the reward. Empty where only the whole was scored.
        turn_states: A key of the state that each turn acted in, for estimators that compare turns; empty without.
        answer: The final answer that a reward found in it, equal texts for equal answers: of the first reward that
            compares answers. Empty where there was none, None without such a reward.
        agent: Who acted, in an episode of several agents; samples of a group are compared with those of the same agent.
        step_scores: The scores of the answer's steps, in order, of each reward that gives some, by its name.
        step_rewards: The same as estimators take them: the sampled token with which a step ends, counted from 0, and
            the weighted scores of all rewards there; ascending. Empty until `with_step_rewards` has placed them.
        step_value: What of `reward` these stand in the place of: the weighted values of their rewards.
    """

    trajectory: Trajectory
    reward: float
    rewards: Mapping[str, float]
    details: Mapping[str, float]
    weights: Mapping[str, float]
    turn_rewards: tuple[float, ...] = ()
    turn_states: tuple[str, ...] = ()
    answer: str | None = None
    agent: str = ""
    step_scores: Mapping[str, tuple[StepScore, ...]] = field(default_factory=dict)
    step_rewards: tuple[tuple[int, float], ...] = ()
    step_value: float = 0.0

    @property
    def outcome(self) -> float:
        """The reward without the values of rewards that gave scores of steps."""
        return self.reward - sum(self.weights[name] * self.rewards[name] for name in self.step_scores)

    def steps_of(self, name: str) -> tuple[StepScore, ...]:
        """Return the scores of steps of a reward that gave some in the group: without any, its value as one step's.

        An episode's turns that have rewards are steps, and the value is part of the last one's.
        """
        if name in self.step_scores or name not in self.rewards or self.turn_rewards:
            return self.step_scores.get(name, ())
        return (StepScore(self.rewards[name], len(self.trajectory.last_text)),)

    @property
    def record(self) -> tuple[TurnRecord, ...]:
        """The trajectory's record."""
        return self.trajectory.record


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingValues:
    """What training made of the tokens of a step's samples, in the order of its groups and of their samples.

    Attributes:
        logprobs: Log-probabilities under the weights that the step began with, one array [T] a sample, in nats; 0
            where not sampled.
        advantages: What the update weighed the tokens with, one array [T] a sample; 0 where not sampled, and in samples
            that it did not use.
        trained: Whether the update used each sample: masks leave some out, and the warm-up of a critic all.
    """

    logprobs: list[FloatArray]
    advantages: list[FloatArray]
    trained: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A sample that infrastructure lost; counted, never trained on.

    Attributes:
        stage: `generate`, `reward` or `environment`; `demonstration` where a reward failed on one.
        name: The reward, environment or replica that failed.
        error: The error's text, with its cause.
        origin: The task's file and line.
    """

    stage: str
    name: str
    error: str
    origin: str

    @property
    def of_policy(self) -> bool:
        """Whether it is a sample of the policy that was lost, and no demonstration."""
        return self.stage != Origin.DEMONSTRATION.value

    def __post_init__(self) -> None:
        # an error may quote what a policy wrote in a call
        object.__setattr__(self, "error", whole_text(self.error))


SampleT = TypeVar("SampleT", Trajectory, Scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Generic[SampleT]):
    """The samples of one task. Group statistics are over one group, never over batch positions.

    Attributes:
        task: What all of them attempt.
        samples: What is trained on.
        failures: What infrastructure lost.
        baselines: Greedy samples to compare with, where the advantage estimator needs them; never trained on.
        off_policy: Answers that the policy did not sample for this group: demonstrations and replayed ones. They are
            compared with the samples and trained on, and count in no figure of the policy's samples.
    """

    task: Task
    samples: tuple[SampleT, ...]
    failures: tuple[Failure, ...]
    baselines: tuple[SampleT, ...] = ()
    off_policy: tuple[SampleT, ...] = ()

    @property
    def whole(self) -> Group[SampleT]:
        """The group with its off-policy answers among its samples, behind the policy's own."""
        return replace(self, samples=self.samples + self.off_policy, off_policy=()) if self.off_policy else self


def by_agent(groups: Sequence[Group[Scored]]) -> list[Group[Scored]]:
    """Return a group for each agent of a group, in the same order of samples; a group of one agent is as it was."""
    parted = []
    for group in groups:
        agents = list(dict.fromkeys(sample.agent for sample in group.samples))
        if len(agents) < 2:
            parted.append(group)
            continue
        for place, agent in enumerate(agents):
            samples = tuple(sample for sample in group.samples if sample.agent == agent)
            parted.append(replace(group, samples=samples, failures=() if place else group.failures))
    return parted


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A sequence to train on, whatever the loss: made of a row or of a trajectory.

    Attributes:
        token_ids: Prompt and response tokens, shape [T].
        loss_mask: True where the loss applies, shape [T]; never at the first token, which nothing predicts.
        group_id: Samples of a step with the same id share a prompt (and may share its computation).
        prompt_length: Leading tokens that all samples of the group share.
        images: Images among its tokens, in order; samples of one group have the same ones in their prompt.
        routes: Experts to compute its tokens with; None where the model chooses them.
        kept: What log-probabilities are normalised over; None for the whole vocabulary.
        origin: `file:line` of its row; empty where it is of no row.
        part: Its place among the sequences of a conversation that became several; 0 for one that did not.
    """

    token_ids: IntArray
    loss_mask: BoolArray
    group_id: str = ""
    prompt_length: int = 0
    images: tuple[PlacedImage, ...] = ()
    routes: RouteArray | None = None
    kept: KeptTokens | None = None
    origin: str = ""
    part: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def first_trained(self) -> int:
        """Tokens before the first one that the loss applies to."""
        return int(self.loss_mask.argmax())

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss applies to."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def sequences(self) -> tuple[TrainingSample, ...]:
        """Its sequences: itself."""
        return (self,)

    def content(self) -> bytes:
        """Return everything that training sees of a row, for fingerprints."""
        images = b"".join(image.picture.digest for image in self.images)
        return self.token_ids.tobytes() + self.loss_mask.tobytes() + images

    @property
    def shared_fields(self) -> dict[str, Any]:
        """The fields that samples of any kind have, for the constructor of another kind."""
        return {name: getattr(self, name) for name in _SHARED_FIELDS}


_SHARED_FIELDS = tuple(each.name for each in fields(TrainingSample))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two sequences that begin alike, the first of which is preferred.

    Attributes:
        chosen: The preferred one.
        rejected: The other.
        margin: By how much the preferred one should score higher; None where pairs have no margins.
    """

    chosen: TrainingSample
    rejected: TrainingSample
    margin: float | None = None

    @property
    def origin(self) -> str:
        """`file:line` of its row."""
        return self.chosen.origin

    @property
    def sequences(self) -> tuple[TrainingSample, ...]:
        """Its two sequences, the chosen one first."""
        return (self.chosen, self.rejected)

    def content(self) -> bytes:
        """Return everything that training sees of a row, for fingerprints."""
        chosen, rejected = self.chosen.content(), self.rejected.content()
        margin = b"" if self.margin is None else struct.pack("<d", self.margin)
        return len(chosen).to_bytes(8, "little") + chosen + rejected + margin


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKAnswers:
    """A teacher's K most likely tokens at each of N targets.

    Attributes:
        ids_NK: Their ids.
        logprobs_NK: Their log-probabilities under the softmax of the whole vocabulary, at the loss's temperature.
        entropy_N: Entropy of that softmax, in nats.
    """

    ids_NK: IntArray
    logprobs_NK: FloatArray
    entropy_N: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySample(TrainingSample):
    """A trajectory that is ready to be trained on.

    Attributes:
        turns: Index of the turn that sampled the token, −1 where not sampled, shape [T].
        behaviour_logprobs: What the inference engine reported, shape [T].
        advantages: Advantage of each sampled token, 0 elsewhere, shape [T].
        reward: Scalar reward, for losses that select by it.
        policy_version: Oldest version that sampled any of its tokens.
        trajectory: Number within the step of the trajectory that it is, or a part of; None for one of its own.
        observed_from: As in `Part`.
        taught: What a teacher says of its trained tokens, in their order; None without one, and where only the sampled
            tokens are compared.
        origin: Who wrote it.
        supervised: True where the token's likelihood is maximised beside the policy's loss, shape [T]; None without.
    """

    turns: IntArray
    behaviour_logprobs: FloatArray
    advantages: FloatArray
    reward: float
    policy_version: int
    trajectory: int | None = None
    observed_from: int | None = None
    taught: TopKAnswers | None = None
    origin: Origin = Origin.SAMPLED
    supervised: BoolArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencedSample(PolicySample):
    """A sample with the reference model's log-probabilities, shape [T], 0 where not sampled."""

    reference_logprobs: FloatArray


class CheckReport(Protocol):
    """What a check of a configuration found; as a text it is what `--check` prints."""

    @property
    def errors(self) -> Sequence[Any]:
        """What stops a run; each has a `key` and a `message`."""

    @property
    def warnings(self) -> Sequence[Any]:
        """What may not be meant."""

    @property
    def conclusion(self) -> str:
        """What it comes to, where there are no errors."""


class RunSummary(Protocol):
    """What a run came to."""

    @property
    def figures(self) -> Mapping[str, Any]:
        """The content of `summary.json`."""


class StopRun(Exception):
    """Raised by a callback: the step under way is the run's last one. It is evaluated and exported like any other.

    Its text is shown, and kept in `events.jsonl`.
    """


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What a notebook or a script does while a run goes on; `StopRun` ends the run early, another error fails it.

    Callbacks of YAML files are plugins: `roll_like.metrics.callbacks.Callback`.

    Attributes:
        on_step: Called after each training step with its number, from 1, and its figures.
        on_evaluation: Called after each evaluation with the number of finished steps, and the evaluation's figures.
    """

    on_step: Callable[[int, Mapping[str, float]], object] | None = None
    on_evaluation: Callable[[int, Mapping[str, float]], object] | None = None

    def __post_init__(self) -> None:
        """Refuse what could not be called, before a run has started.

        Raises:
            ConfigError: One of them does not take a number and figures.
        """
        for name, function in (("on_step", self.on_step), ("on_evaluation", self.on_evaluation)):
            if function is None:
                continue
            try:
                inspect.signature(function).bind(1, {})
            except TypeError as error:
                raise ConfigError(
                    f"{name} is called with a number of steps and figures, and {function!r} does not take these: "
                    f"{error}",
                    fix="write it as `def f(step, figures)`, or `lambda step, figures: …`",
                ) from None
            except ValueError:
                continue  # a function in C that does not tell what it takes


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """What a run left behind.

    Attributes:
        name: Name of the run.
        directory: Its folder.
        summary: Its `figures` are those of `summary.json`; None when no step was finished.
        metrics: One dictionary a step, as in `metrics.jsonl`.
        evaluations: The number of finished steps and the figures of each evaluation, as in `evaluations.jsonl`.
        stopped: Whether SIGTERM ended it before its last step.
    """

    name: str
    directory: Path
    summary: RunSummary | None
    metrics: Sequence[Mapping[str, float]]
    evaluations: Sequence[tuple[int, Mapping[str, float]]]
    stopped: bool

    def frame(self, kind: Literal["steps", "evaluations", "rollouts"] = "steps") -> DataFrame:
        """Return a table with a row for each training step or evaluation, and a column for each metric.

        With `rollouts` it has a row for each recorded sample of training, with its prompt, text and rewards.

        Raises:
            ConfigError: There is no such table.
        """
        from pandas import DataFrame, Index

        if kind == "rollouts":
            files = sorted((self.directory / "rollouts").glob("step_*.jsonl"))
            lines = [
                (int(file.stem.removeprefix("step_")), line)
                for file in files
                for line in file.read_bytes().splitlines()
            ]
            return DataFrame([{"step": step, **json.loads(line)} for step, line in lines])
        if kind == "steps":
            return DataFrame(list(self.metrics), index=Index(range(1, len(self.metrics) + 1), name="step"))
        if kind != "evaluations":
            raise ConfigError(f"there is no table {kind!r}", fix="ask for steps, evaluations or rollouts")
        steps = Index([step for step, _ in self.evaluations], name="step")
        return DataFrame([values for _, values in self.evaluations], index=steps)

    def __repr__(self) -> str:
        """Return its name, how far it came, what it learned, and where it is."""
        count = len(self.metrics)
        parts = [f"{count} step{'s' * (count != 1)}" + (", stopped" if self.stopped else "")]
        figures = {} if self.summary is None else self.summary.figures
        for what, names in {
            "reward": ("reward_first", "reward_last"),
            "evaluation": ("eval_before", "eval_after"),
        }.items():
            first, last = map(figures.get, names)
            if first is not None and last is not None:
                parts.append(f"{what} {first:.3g} → {last:.3g}")
        return f"RunResult({self.name}: {', '.join(parts)}; {self.directory})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What a model does to the products of its output layer: cap · tanh(scale · product / cap), or scale · product.

    Attributes:
        scale: 1 for most models.
        cap: Bound of logits (Gemma 2, arXiv:2408.00118, section 2: soft-capping); None without one.
    """

    scale: float = 1.0
    cap: float | None = None

    def of(self, products: Tensor) -> Tensor:
        """Return the logits, in the precision of the products."""
        logits = products * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


#: What most models do: nothing.
PLAIN_LOGITS = LogitTransform()
