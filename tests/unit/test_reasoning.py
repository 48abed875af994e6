"""Reasoning and answer: where a response is split, and who is given which part."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from chat_templates import renderer
from fake_policy import FakePolicy, episode_settings
from proxy_rig import rig
from reward_support import completion, value
from tests_support import group, scored, task
from tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer

from roll_like import Completion, make_env
from roll_like.agents.episode import Started, Stepped, play
from roll_like.builtin.envs.single_turn import SingleTurn
from roll_like.builtin.rewards.exact_match import ExactMatch, ExactMatchConfig
from roll_like.builtin.rewards.format import Format, FormatConfig
from roll_like.builtin.rewards.ifeval import IFEval, IFEvalConfig
from roll_like.builtin.rewards.jury import judged_text
from roll_like.builtin.rewards.length import Length, LengthConfig
from roll_like.builtin.rewards.repetition import Repetition, RepetitionConfig
from roll_like.check.tokens import check_reasoning
from roll_like.config.model import ModelConfig
from roll_like.data.chat import Renderer
from roll_like.data.reasoning import KNOWN_TAGS, Turn, answer_of, known_tags, split_reasoning
from roll_like.envs import History, read_action
from roll_like.errors import ConfigError
from roll_like.inference.stops import ResponseDecoder
from roll_like.rewards.base import given_completion
from roll_like.rewards.scorer import to_completion
from roll_like.rollout.storage import read_groups, write_groups
from roll_like.types import THINK, ReasoningTags, StopReason, TurnRecord

OPENED = ReasoningTags(opened=True)
MISTRAL = ReasoningTags(open="[THINK]", close="[/THINK]")
HARMONY = KNOWN_TAGS[0]
KIMI_K3 = KNOWN_TAGS[1]
MUSE, INKLING = KNOWN_TAGS[2:4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris", (None, "Paris")),
        ("", (None, "")),
        ("<think>France.</think>Paris", ("France.", "Paris")),
        ("<think>\nFrance.\n</think>\n\nParis\n", ("France.", "Paris\n")),
        ("\n<think>France.</think> Paris", ("France.", " Paris")),
        ("<think>\n\n</think>\n\n    return 1", ("", "    return 1")),  # an answer keeps its indentation
        ("France.\n</think>\nParis", ("France.", "Paris")),  # the prompt opened it
        ("</think>Paris", ("", "Paris")),
        ("<think>France, perhaps Paris", ("France, perhaps Paris", "")),
        ("<think>", ("", "")),
        ("<think>France.</think>", ("France.", "")),
        ("Let me see. <think>France.</think>Paris", ("Let me see. <think>France.", "Paris")),
        ("<think>a</think>b<think>c</think>d", ("a</think>b<think>c", "d")),
        ("<think>a</think>b</think>c", ("a</think>b", "c")),  # the last closing tag counts
        ("<think>a</think>Paris<think>but", ("a</think>Parisbut", "")),  # it thinks again, without an end
        ("Paris. <think>But wait", ("Paris. But wait", "")),
        # what is only written about is no tag
        ("Write `<think>` first.", (None, "Write `<think>` first.")),
        ('Write "<think>" and "</think>".', (None, 'Write "<think>" and "</think>".')),
        ("Write `<think>…</think>` first.", (None, "Write `<think>…</think>` first.")),
        ("Use “<think>”, ‘</think>’ or «</think>».", (None, "Use “<think>”, ‘</think>’ or «</think>».")),
        ("<think>a</think>The tag (`<think>`) begins it.", ("a", "The tag (`<think>`) begins it.")),
        ("<think>a</think>text.split('</think>')[-1]", ("a", "text.split('</think>')[-1]")),
        ("<think>I have to write `</think>`, then", ("I have to write `</think>`, then", "")),
        ("<think>I close with `</think>`.</think>done", ("I close with `</think>`.", "done")),
        # a quotation that ends where reasoning does is none of the tag
        ('<think>It is "Paris"</think>"Paris"', ('It is "Paris"', '"Paris"')),
        ("<think>It is `Paris`</think>`Paris`", ("It is `Paris`", "`Paris`")),
        ("<think>It's 5'</think>'5'", ("It's 5'", "'5'")),
    ],
)
def test_the_answer_follows_the_last_closing_tag(text: str, expected: tuple[str | None, str]) -> None:
    assert split_reasoning(text) == expected


def test_a_long_run_of_backticks_is_read_in_linear_time() -> None:
    assert split_reasoning("`" * 150_000 + "</think>b")[1] == "b"  # minutes where it is quadratic


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        ("France, so", OPENED, ("France, so", "")),
        ("France.\n</think>\nParis", OPENED, ("France.", "Paris")),
        ("<think>France.</think>Paris", OPENED, ("France.", "Paris")),
        ("", OPENED, ("", "")),
        ("[THINK]France.[/THINK]Paris", MISTRAL, ("France.", "Paris")),
        ("[THINK]France", MISTRAL, ("France", "")),
        ("<think>France.</think>Paris", MISTRAL, (None, "<think>France.</think>Paris")),
        ("<think>France.</think>Paris", None, (None, "<think>France.</think>Paris")),
        ("<|channel|>final<|message|>Paris", HARMONY, (None, "Paris")),
        ("<|channel|>analysis<|message|>France", HARMONY, ("France", "")),
        (
            "<|channel|>analysis<|message|>France.<|end|><|start|>assistant<|channel|>final<|message|>Paris",
            HARMONY,
            ("France.", "Paris"),
        ),
        (
            "<|channel|>analysis<|message|>France.<|end|><|start|>assistant<|channel|>final<|message|>Paris<|end|>",
            HARMONY,
            ("France.", "Paris"),
        ),
        (
            "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.ask<|message|>{}",
            HARMONY,
            ("Ask.", "<|channel|>commentary to=functions.ask<|message|>{}"),
        ),
        (
            "<|open|>think<|sep|>France.<|close|>think<|sep|><|open|>response<|sep|>Paris<|close|>response<|sep|>"
            "<|close|>message<|sep|>",
            KIMI_K3,
            ("France.", "Paris"),
        ),
        ("<|open|>think<|sep|>France", KIMI_K3, ("France", "")),
        (
            " to=self<|message|>France<|eom|><|start|>assistant to=user<|message|>Paris<|eot|>",
            MUSE,
            ("France", "Paris"),
        ),
        ("<|start|>assistant to=self<|message|>France.<|eom|>Paris", MUSE, ("France.", "Paris")),
        (" to=self<|message|>France", MUSE, ("France", "")),
        (
            "<|content_thinking|>France<|end_message|><|message_model|><|content_text|>Paris<|end_message|>",
            INKLING,
            ("France", "Paris"),
        ),
        ("<|content_text|>Paris<|end_message|>", INKLING, (None, "Paris")),
        (
            "<think>France.</think>\n<response>\nParis\n</response>",
            ReasoningTags(around=("<response>", "</response>")),
            ("France.", "Paris\n"),
        ),
    ],
)
def test_other_tags_and_prompts_that_open_reasoning(
    text: str, tags: ReasoningTags | None, expected: tuple[str | None, str]
) -> None:
    assert split_reasoning(text, tags) == expected


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (CHAT_TEMPLATE, [], None),
        ("{{ message.content.split('</think>')[-1] }}", [], ("<think>", "</think>")),
        ("'<seed:think>' + r + '</seed:think>'", [], ("<seed:think>", "</seed:think>")),
        ("<mm:think></mm:think>", [], ("<mm:think>", "</mm:think>")),
        ("<longcat_think></longcat_think>", [], ("<longcat_think>", "</longcat_think>")),
        ("<|assistant|><thought>{{ c }}</thought>", [], ("<thought>", "</thought>")),
        ("[THINK]{{ t }}[/THINK]", [], ("[THINK]", "[/THINK]")),
        ("<|channel|>analysis<|message|>…<|end|>", [], ("<|channel|>analysis<|message|>", "<|end|>")),
        ("<|START_THINKING|><|END_THINKING|>", [], ("<|START_THINKING|>", "<|END_THINKING|>")),
        (CHAT_TEMPLATE, ["<|im_end|>", "◁think▷", "◁/think▷"], ("◁think▷", "◁/think▷")),
        (CHAT_TEMPLATE, ["<think>", "</think>"], ("<think>", "</think>")),
        ("</think>", ["[THINK]", "[/THINK]"], ("<think>", "</think>")),  # what the template says goes first
    ],
)
def test_tags_are_known_from_templates_and_tokens(
    template: str, tokens: list[str], expected: tuple[str, str] | None
) -> None:
    found = known_tags(template, tokens)
    assert (found and (found.open, found.close)) == expected


def test_a_wrapped_response_is_known_from_the_template() -> None:
    found = known_tags("Think in <think></think> and respond in <response></response>.")
    assert found == ReasoningTags(around=("<response>", "</response>"))


# ---- completions ----------------------------------------------------------------------------------


def test_a_text_alone_is_split_when_a_completion_is_made() -> None:
    made = completion("<think>a</think>\nb")
    assert (made.text, made.reasoning, made.full_text) == ("b", "a", "<think>a</think>\nb")
    assert made.tags == THINK
    opened = completion("a</think>b")
    assert (opened.text, opened.reasoning, opened.tags) == ("b", "a", OPENED)
    plain = completion("b")
    assert (plain.text, plain.reasoning, plain.full_text) == ("b", None, "b")
    parts = replace(plain, full_text="", reasoning="a")
    assert (parts.text, parts.reasoning, parts.full_text) == ("b", "a", "<think>a</think>b")


@pytest.mark.parametrize("text", ["<think>a</think>b", "a</think>b", "<think>a", "b", "", "write `</think>`"])
def test_copies_of_a_completion_are_equal_to_it(text: str) -> None:
    made = completion(text)
    again = (replace(made), pickle.loads(pickle.dumps(made)), copy.deepcopy(made), replace(made, answer=made.answer))
    assert all(one == made for one in again)
    assert replace(made, answer="x").text == made.text


def trajectory(text: str, tags: ReasoningTags | None, **changes: Any) -> Any:
    one = scored(replace(task(0), reasoning=tags), 1.0).trajectory
    return replace(one, text=text, **changes)


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        ("a</think>b", OPENED, ("b", "a")),
        ("a, and so", OPENED, ("", "a, and so")),
        ("", OPENED, ("", "")),
        ("[THINK]a[/THINK]b", MISTRAL, ("b", "a")),
        ("<think>a</think>b", None, ("<think>a</think>b", None)),
        ("b", THINK, ("b", None)),
    ],
)
def test_a_run_splits_at_the_models_own_tags(
    text: str, tags: ReasoningTags | None, expected: tuple[str, str | None]
) -> None:
    made = to_completion(trajectory(text, tags))
    assert (made.text, made.reasoning) == expected
    assert (made.full_text, made.tags) == (text, tags)
    assert replace(made) == pickle.loads(pickle.dumps(made)) == made


def turn(text: str, tags: ReasoningTags | None, shown: str) -> TurnRecord:
    return TurnRecord(
        shown=({"role": "user", "content": shown},),
        text=text,
        tokens=1,
        prompt_tokens=1,
        reward=0.0,
        state="",
        began=0.0,
        sampled=0.0,
        ended=0.0,
        reasoning=tags,
    )


def test_an_episodes_conversation_is_without_reasoning() -> None:
    turns = (
        turn("Left is a wall.</think>right", OPENED, "Which way?"),
        turn("[THINK]a[/THINK]up", MISTRAL, "And now?"),
    )
    made = to_completion(trajectory("all", THINK, record=turns))
    assert (made.text, made.reasoning, made.full_text) == ("up", "a", "[THINK]a[/THINK]up")
    said = [message["content"] for message in made.conversation]
    assert said == ["Which way?", "right", "And now?", "up"]
    assert judged_text(made) == "[assistant] right\n\n[user] And now?\n\n[assistant] up"


def test_a_judge_sees_no_answer_where_there_was_only_reasoning() -> None:
    assert judged_text(completion("<think>a")) == ""
    assert judged_text(completion("<think>a</think> b")) == " b"
    assert judged_text(to_completion(trajectory("all", THINK, record=(turn("a", OPENED, "?"),)))) == ""


# ---- rewards that take the whole response ----------------------------------------------------------


TAGS = FormatConfig(tags=("think", "answer"))


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        ("First.\n</think>\n<answer>4</answer>", OPENED, 1.0),
        ("<think>First.</think><answer>4</answer>", THINK, 1.0),
        ("First.\n</think>\n<answer>4</answer>", THINK, 0.0),  # it did not open what the prompt had left to it
        ("<think>First.</think><answer>4</answer>", OPENED, 0.0),  # opened twice
        ("First. <answer>4</answer>", OPENED, 0.0),
        ("First.</think>4", OPENED, 0.0),
        ("", OPENED, 0.0),
        ("<think>First.</think><answer>4</answer>", MISTRAL, 1.0),  # tags of the task's own, not the model's
    ],
)
def test_the_form_of_a_response_includes_its_reasoning(text: str, tags: ReasoningTags, expected: float) -> None:
    (result,) = Format(TAGS).score([to_completion(trajectory(text, tags))])
    assert result.value == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("config", "text", "expected"),
    [
        ({"tags": ["answer"]}, "<think>So <answer>3</answer>?</think><answer>4</answer>", 1.0),
        ({"tags": ["answer"]}, "<think>So <answer>3</answer>", 0.0),
        ({"pattern": r"\d+"}, "<think>Three? No, four.</think>\n4", 1.0),
        ({"pattern": r"<think>.*</think>\s*\d+"}, "<think>Four.</think>\n4", 1.0),
        ({"pattern": r"<think>.*<\/think>\s*\d+"}, "Four.</think>\n4", 1.0),
        ({"pattern": r"<think>.*</think>\s*\d+"}, "4", 0.0),
        ({"pattern": ".*4.*"}, "<think>perhaps 4", 0.0),
        ({"json_schema": {"type": "object"}}, '<think>{"a": 2}</think>{"a": 1}', 1.0),
        ({"json_schema": {"type": "object"}}, '<think>{"a": 2}', 0.0),
    ],
)
def test_other_checks_of_form_see_the_answer_unless_they_name_the_tags(
    config: dict[str, Any], text: str, expected: float
) -> None:
    assert value(Format(FormatConfig(**config)), text) == expected


def test_repetition_and_length_count_reasoning() -> None:
    looping = "<think>" + "again and again " * 60 + "</think>Paris"
    assert value(Repetition(RepetitionConfig()), looping) < -0.9
    assert value(Length(LengthConfig(max_tokens=50, buffer_tokens=0)), looping) == -1.0


def test_instructions_are_counted_and_forbidden_in_the_answer_alone() -> None:
    kinds = {
        "punctuation:no_comma": {},
        "length_constraints:number_words": {"num_words": 14, "relation": "less than"},
        "startend:quotation": {},
    }
    good = '"The old harbour lies under a grey sky and the boats are still."'
    for kind, settings in kinds.items():
        metadata = {"instruction_id_list": [kind], "kwargs": [settings]}
        assert value(IFEval(IFEvalConfig()), f"<think>Well, {'so ' * 30}</think>\n\n{good}", **metadata) == 1.0, kind


def test_an_unclosed_thought_is_no_answer_even_where_it_holds_one() -> None:
    assert value(ExactMatch(ExactMatchConfig()), "<think>Paris", "Paris") == 0.0
    opened = to_completion(trajectory("Paris", OPENED))
    (result,) = ExactMatch(ExactMatchConfig()).score([replace(opened, answer="Paris")])
    assert result.value == 0.0  # type: ignore[union-attr]


def test_given_answers_are_split_as_well() -> None:
    made = given_completion("<think>a b</think>c", messages=(), answer=None, metadata={})
    assert (made.text, made.reasoning, made.response_tokens) == ("c", "a b", 2)
    assert isinstance(made, Completion)


# ---- environments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (Turn("Left.[/THINK]right", ReasoningTags(open="[THINK]", close="[/THINK]", opened=True)), "right"),
        (Turn("still thinking of left", OPENED), ""),
        (Turn("<think>left", None), "<think>left"),
        ("<think>left</think>right", "right"),
    ],
)
def test_a_turn_knows_where_its_answer_is(text: str, expected: str) -> None:
    for one in (text, pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert answer_of(one) == expected
        assert one == str(text)


@pytest.mark.parametrize(
    ("text", "style", "expected"),
    [
        ("<think><action>up</action></think><action>left</action>", "tag", "left"),
        ("<think><action>up</action></think>left", "tag", None),
        ("<think><action>up</action>", "tag", None),
        (Turn("<action>up</action>", OPENED), "tag", None),
        ('{"action": "up"}</think>{"action": "left"}', "json", "left"),
        ('<think>{"action": "up"}', "json", None),
        ("<think>Up is a wall.</think>\nleft.", "word", "left"),
        ("<think>left", "word", None),
    ],
)
def test_actions_are_read_from_the_answer(text: str, style: Any, expected: str | None) -> None:
    assert read_action(text, style) == expected


class _Capital(SingleTurn):
    def ask(self, seed: int | None) -> tuple[str, dict[str, Any]]:
        return "Capital of France?", {}

    def score(self, answer: str) -> float:
        return float(answer == "Paris")

    def solution(self) -> str:
        return "Paris"


@pytest.mark.parametrize(
    ("style", "text", "reward", "invalid"),
    [
        ("text", "<think>Rome?</think>\n\nParis", 1.0, False),
        ("text", "<think>Paris", -0.5, True),
        ("text", Turn("Paris", OPENED), -0.5, True),
        ("tag", "<think><answer>Paris</answer></think>London", -0.5, True),
        ("boxed", "<think>\\boxed{Rome}</think>\\boxed{Paris}", 1.0, False),
        ("boxed", "\\boxed{Rome}</think>\\boxed{Paris}", 1.0, False),
        ("boxed", "<think>\\boxed{Paris}", -0.5, True),
        ("boxed", Turn("[THINK]\\boxed{Paris}[/THINK]Rome", MISTRAL), -0.5, True),
    ],
)
def test_questions_are_answered_after_the_reasoning(style: Any, text: str, reward: float, invalid: bool) -> None:
    env = _Capital(style=style, invalid_penalty=0.5, system_prompt=None)
    env.reset(seed=0)
    _, got, _, _, info = env.step(text)
    assert (got, info["invalid_action"]) == (reward, invalid)


def test_a_grid_is_walked_by_answers() -> None:
    env = make_env("roll_like/FrozenLake-v0", size=4)
    env.reset(seed=7)
    assert env.step("<think>not <action>up</action>")[4]["invalid_action"]
    assert not env.step("<think>not <action>up</action></think><action>down</action>")[4]["invalid_action"]


def test_history_shows_answers_without_reasoning() -> None:
    class Echo(gymnasium.Env[str, str]):
        def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
            return "start", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "next", 0.0, False, False, {}

    env = History(Echo(), turns=2)
    env.reset()
    text = env.step(Turn("It is a wall.</think>left", OPENED))[0]
    assert text == "Before:\nstart\nYour answer: left\n\nNow:\nnext"


class _Told:
    """An environment of two turns that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    async def reset(self, seed: int) -> Started:
        return Started(messages=[{"role": "user", "content": "Which way?"}], tools=(), state="s")

    async def step(self, text: str) -> Stepped:
        self.given.append(text)
        return Stepped(
            messages=[{"role": "user", "content": "And now?"}],
            reward=0.0,
            terminated=len(self.given) == 2,
            truncated=False,
            success=None,
            state="s",
        )

    async def close(self) -> None:
        pass


async def test_an_episode_tells_its_environment_that_the_prompt_opened_the_reasoning() -> None:
    render = renderer("opens reasoning")
    env = _Told()
    (episode,) = await play(env, FakePolicy(render, ["a wall</think>left", "a door"]), render, episode_settings())
    assert env.given == ["a wall</think>left", "a door"]  # all that was written
    assert [answer_of(text) for text in env.given] == ["left", ""]
    made = to_completion(episode.trajectory)
    assert (made.text, made.reasoning, made.full_text) == ("", "a door", "a door")
    assert [message["content"] for message in made.conversation if message["role"] == "assistant"] == ["left", ""]


# ---- from the model --------------------------------------------------------------------------------


def test_a_renderer_knows_its_templates_tags_and_whether_prompts_open_them() -> None:
    prompt = [{"role": "user", "content": "What does <think> mean?"}]
    for name, opened in {"chatml": False, "opens reasoning": True, "drops reasoning": False}.items():
        render = renderer(name)
        assert render.reasoning_after(render.render(prompt, ())) == ReasoningTags(opened=opened)
    own = Renderer(make_tiny_tokenizer(), reasoning=MISTRAL)
    assert own.reasoning_after("…[THINK]\n") == replace(MISTRAL, opened=True)
    none = Renderer(make_tiny_tokenizer(), reasoning=None)
    assert (none.reasoning_after("<think>"), none.kept_tokens) == (None, ())


@pytest.mark.parametrize(("name", "closed"), [("Qwen3", False), ("Qwen3, thinking off", True)])
def test_qwen3_opens_no_reasoning_in_the_prompt(name: str, closed: bool) -> None:
    render = renderer(name)
    prompt = render.render([{"role": "user", "content": "?"}], ())
    assert prompt.rstrip().endswith("</think>") is closed
    assert render.reasoning_after(prompt) == THINK
    assert render.kept_tokens == ()  # they are no special tokens


def _special(*tokens: str) -> Any:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def test_special_tokens_that_delimit_reasoning_stay_in_the_text() -> None:
    tokenizer = _special("[THINK]", "[/THINK]", "[TOOL]")
    render = Renderer(tokenizer)
    assert render.reasoning == MISTRAL
    assert render.kept_tokens == ("[/THINK]", "[THINK]")
    ids = render.encode("[THINK]Left is[/THINK] right[TOOL]<|im_end|>").tolist()
    assert ResponseDecoder(tokenizer)(ids) == "Left is right"  # nothing tells answer and reasoning apart
    text = ResponseDecoder(tokenizer, render.kept_tokens)(ids)
    assert text == "[THINK]Left is[/THINK] right"
    assert split_reasoning(text, render.reasoning) == ("Left is", " right")


def test_harmony_keeps_the_tokens_of_its_headers() -> None:
    tokenizer = _special("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>")
    tokenizer.chat_template = CHAT_TEMPLATE + "{# <|channel|>analysis<|message|> … <|end|> #}"
    render = Renderer(tokenizer)
    assert render.reasoning == HARMONY
    written = "<|channel|>analysis<|message|>Left.<|end|><|start|>assistant<|channel|>final<|message|>right"
    text = ResponseDecoder(tokenizer, render.kept_tokens)(render.encode(written + "<|return|>").tolist())
    assert text == written
    assert split_reasoning(text, render.reasoning) == ("Left.", "right")


def test_the_configuration_sets_tags_or_none() -> None:
    assert ModelConfig(path="x").reasoning_tags == "auto"
    assert ModelConfig(path="x", reasoning=None).reasoning_tags is None
    own = ModelConfig(path="x", reasoning={"open": "<reason>", "close": "</reason>"})
    assert own.reasoning_tags == ReasoningTags(open="<reason>", close="</reason>")
    for wrong, said in (
        ({"open": "<a>", "close": "<a>"}, "cannot be told apart"),
        ({"open": "<a>"}, "close"),
        ({"open": "", "close": "</a>"}, "open"),
        ("qwen3", "auto"),
    ):
        with pytest.raises(ConfigError, match=said):
            ModelConfig(path="x", reasoning=wrong)


def test_tags_come_back_from_disk(tmp_path: Path) -> None:
    own = replace(MISTRAL, opened=True)
    one = scored(replace(task(0), reasoning=own), 1.0)
    one = replace(one, trajectory=replace(one.trajectory, record=(turn("a", own, "?"), turn("b", None, "?"))))
    write_groups(tmp_path / "rollouts", [replace(group(one.trajectory.task, []), samples=(one,))])
    (back,) = read_groups(tmp_path / "rollouts")
    assert back.task.reasoning == own
    assert [record.reasoning for record in back.samples[0].record] == [own, None]


class _Sampling:
    """As much of a configuration as the check reads."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.rollout = type("rollout", (), {"stop": stop})
        self.evaluation = None


@pytest.mark.parametrize(
    ("template", "stop", "found"),
    [
        ("chatml", (), []),
        ("opens reasoning", (), ["note"]),
        ("opens reasoning", ("</think>",), ["note", "error"]),
        ("chatml", ("</think>",), ["warning"]),
        ("chatml", ("</answer>",), []),
    ],
)
def test_a_check_says_where_responses_are_split(template: str, stop: tuple[str, ...], found: list[str]) -> None:
    findings = list(check_reasoning(_Sampling(stop), renderer(template)))  # type: ignore[arg-type]
    assert [finding.level for finding in findings] == found


def test_the_stop_reason_says_nothing_about_the_answer() -> None:
    cut = to_completion(trajectory("a</think>b", OPENED, stop_reason=StopReason.LENGTH))
    assert (cut.text, cut.stop_reason) == ("b", StopReason.LENGTH)


@pytest.mark.parametrize(
    ("posted", "expected"),
    [
        (None, "left"),  # the content of the last answer, whose reasoning the prompt opened
        ("left", "left"),  # the agent took the reasoning off itself
        ("a wall</think>left", "left"),
        ("<think>a wall", ""),
    ],
)
async def test_what_a_program_answers_is_split_as_its_content_is(posted: str | None, expected: str) -> None:
    async with rig("a wall</think>left", render=renderer("opens reasoning")) as one:
        await one.ask("Which way?")
        one.episode.answer = posted
        assert answer_of(one.episode.final) == expected


async def test_a_call_in_reasoning_that_the_prompt_opened_is_no_call() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    async with rig(f"perhaps {call}", f"a wall</think>{call}", render=renderer("opens reasoning")) as one:
        for content, calls in ((f"perhaps {call}", 0), (None, 1)):
            answer = await one.client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "Which way?"}], tools=[tool]
            )
            message = answer.choices[0].message
            assert len(message.tool_calls or ()) == calls
            assert content is None or message.content == content


@pytest.mark.parametrize(
    ("full_text", "start"),
    [
        ("<response>s</response>", 10),  # which the closing tag spells too
        ("<think>s</think>\n<response>\ns\n</response>\n", 28),
        ("<think>s</think>s", 16),
        ("<response></response>", 21),
    ],
)
def test_where_the_answer_begins(full_text: str, start: int) -> None:
    tags = ReasoningTags(around=("<response>", "</response>"))
    reasoning, answer = split_reasoning(full_text, tags)
    made = given_completion(answer, messages=(), answer=None, metadata={})
    found = replace(made, text=answer, reasoning=reasoning, full_text=full_text, tags=tags)
    assert found.answer_start == start
    assert full_text[start:].startswith(answer)
