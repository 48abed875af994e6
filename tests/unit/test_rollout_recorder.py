"""From requests that hold whole histories to token-exact conversations: going on, forks, edits, taking back."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import renderer
from fake_policy import generation, logprobs_of, spelled

from roll_like.agents.recorder import RecordedTurn, Recorder
from roll_like.errors import EnvError

CHATML = renderer("chatml")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def say(recorder: Recorder, history: list[dict[str, Any]], text: str, tools: Any = (), **message: Any) -> RecordedTurn:
    """Ask for an answer, sample it, and record it."""
    draft = recorder.draft(history, tools)
    return recorder.commit(
        draft, generation(CHATML, text), {"role": "assistant", "content": text, **message}, began=1.0, sampled=2.0
    )


def test_a_history_that_goes_on_is_one_sequence() -> None:
    recorder = Recorder(CHATML)
    say(recorder, [user("hello")], "brown fox")
    say(recorder, [user("hello"), assistant("brown fox"), user("more")], "lazy dog")
    (segment,) = recorder.segments()
    sampled = [spelled(CHATML, "brown fox"), spelled(CHATML, "lazy dog")]
    first = CHATML.encode(CHATML.render([user("hello")], ()))
    glue = CHATML.encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    expected = [*first, *sampled[0], *glue, *sampled[1]]
    assert segment.token_ids.tolist() == expected
    assert segment.turns.tolist() == [-1] * len(first) + [0] * 10 + [-1] * len(glue) + [1] * 9
    assert segment.logprobs[segment.turns == 1].tolist() == logprobs_of(sampled[1]).tolist()
    assert [(one.start, one.end) for one in segment.segments] == [
        (len(first), len(first) + 10),
        (len(expected) - 9, len(expected)),
    ]
    assert recorder.conversations == 1
    assert recorder.first_prompt[0] == (user("hello"),)
    assert recorder.first_prompt[1].tolist() == first.tolist()


@pytest.mark.parametrize(
    "returned",
    [
        {"role": "assistant", "content": "brown fox", "refusal": None, "annotations": []},
        {"role": "assistant", "content": "  brown fox\n"},  # frameworks trim
        {"role": "assistant", "content": "brown fox", "tool_calls": []},
    ],
)
def test_an_answer_is_known_again_in_other_clothes(returned: dict[str, Any]) -> None:
    recorder = Recorder(CHATML)
    say(recorder, [user("hello")], "brown fox")
    say(recorder, [user("hello"), returned, user("more")], "dog")
    assert recorder.conversations == len(recorder.segments()) == 1


def test_a_history_that_was_edited_begins_a_new_sequence() -> None:
    recorder = Recorder(CHATML)
    say(recorder, [user("hello")], "brown fox")
    say(recorder, [user("hello"), assistant("brown cat"), user("more")], "dog")
    first, second = recorder.segments()
    assert first.turns.max() == 0
    assert set(second.turns.tolist()) == {-1, 1}
    assert second.prompt_length == len(
        CHATML.encode(CHATML.render([user("hello"), assistant("brown cat"), user("more")], ()))
    )


def test_a_history_that_was_summed_up_begins_a_new_sequence_that_goes_on() -> None:
    recorder = Recorder(CHATML)
    say(recorder, [user("hello")], "brown fox")
    say(recorder, [user("in short: a fox")], "dog")
    say(recorder, [user("in short: a fox"), assistant("dog"), user("and?")], "cat")
    assert [sorted(set(segment.turns.tolist())) for segment in recorder.segments()] == [[-1, 0], [-1, 1, 2]]


def test_other_tools_begin_a_new_sequence() -> None:
    recorder = Recorder(CHATML)
    tool = {"type": "function", "function": {"name": "look"}}
    say(recorder, [user("hello")], "fox", [tool])
    say(recorder, [user("hello"), assistant("fox"), user("more")], "dog", [])
    assert recorder.conversations == 2


def test_two_that_go_on_from_one_answer_train_it_once() -> None:
    recorder = Recorder(CHATML)
    say(recorder, [user("hello")], "fox")
    history = [user("hello"), assistant("fox")]
    say(recorder, [*history, user("left")], "dog")
    say(recorder, [*history, user("right")], "cat")
    first, second = recorder.segments()
    assert set(first.turns.tolist()) == {-1, 0, 1}
    assert set(second.turns.tolist()) == {-1, 2}
    both = [turn for segment in (first, second) for turn in segment.turns.tolist() if turn >= 0]
    assert len(both) == sum(len(spelled(CHATML, text)) for text in ("fox", "dog", "cat"))


def test_two_at_the_same_time_from_one_answer() -> None:
    recorder = Recorder(CHATML)
    say(recorder, [user("hello")], "fox")
    history = [user("hello"), assistant("fox")]
    one, two = (recorder.draft([*history, user(text)], ()) for text in ("left", "right"))
    for draft, text in ((two, "cat"), (one, "dog")):
        recorder.commit(draft, generation(CHATML, text), assistant(text), began=0, sampled=0)
    assert recorder.conversations == 2
    first, second = recorder.segments()  # in the order of their latest turns
    assert set(first.turns.tolist()) == {-1, 1}
    assert set(second.turns.tolist()) == {-1, 0, 2}


def test_the_same_first_request_twice_is_two_samples() -> None:
    recorder = Recorder(CHATML)
    for _ in range(2):
        say(recorder, [user("hello")], "fox")
    say(recorder, [user("hello"), assistant("fox"), user("more")], "dog")
    assert recorder.conversations == 2
    assert [int(segment.turns.max()) for segment in recorder.segments()] == [0, 2]


def test_a_draft_that_is_dropped_leaves_no_trace() -> None:
    recorder = Recorder(CHATML)
    say(recorder, [user("hello")], "fox")
    history = [user("hello"), assistant("fox")]
    recorder.drop(recorder.draft([*history, user("left")], ()))
    recorder.drop(recorder.draft([user("other")], ()))
    say(recorder, [*history, user("right")], "dog")
    (segment,) = recorder.segments()
    assert "left" not in CHATML.decode(segment.token_ids)
    assert set(segment.turns.tolist()) == {-1, 0, 1}


def test_a_turn_is_taken_back_and_asked_for_again() -> None:
    recorder = Recorder(CHATML)
    say(recorder, [user("hello")], "fox")
    history = [user("hello"), assistant("fox"), user("more")]
    lost = say(recorder, history, "dog")
    assert recorder.take_back(lost)
    assert len(recorder.turns) == 1
    say(recorder, history, "cat")
    (segment,) = recorder.segments()
    assert segment.token_ids[segment.turns == 1].tolist() == spelled(CHATML, "cat").tolist()
    assert CHATML.decode(segment.token_ids).count("dog") == 0


def test_a_first_turn_is_taken_back() -> None:
    recorder = Recorder(CHATML)
    assert recorder.take_back(say(recorder, [user("hello")], "fox"))
    assert recorder.turns == recorder.segments() == []
    assert recorder.conversations == 0


def test_a_turn_that_the_agent_went_on_from_has_arrived() -> None:
    recorder = Recorder(CHATML)
    turn = say(recorder, [user("hello")], "fox")
    say(recorder, [user("hello"), assistant("fox"), user("more")], "dog")
    assert not recorder.take_back(turn)
    later = recorder.draft([user("hello"), assistant("fox"), user("more"), assistant("dog"), user("on")], ())
    assert not recorder.take_back(recorder.turns[-1])  # an answer to it is being sampled
    recorder.drop(later)
    assert len(recorder.turns) == 2


def test_what_tools_answered_is_kept_with_the_call() -> None:
    recorder = Recorder(CHATML)
    call = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    turn = say(recorder, [user("1+1?")], text, content=None, tool_calls=[call])
    spaced = {**call, "function": {"name": "add", "arguments": {"a": 1}}}  # as `chat_api` reads it
    history = [user("1+1?"), {"role": "assistant", "content": "", "tool_calls": [spaced]}]
    say(recorder, [*history, {"role": "tool", "tool_call_id": "call_9", "content": "2"}], "two")
    (segment,) = recorder.segments()
    assert segment.token_ids[segment.turns == 0].tolist() == spelled(CHATML, text).tolist()
    assert turn.results == {"call_9": "2"}
    assert turn.ended == 2.0


def test_a_template_that_drops_reasoning_cuts() -> None:
    drops = renderer("drops reasoning")
    recorder = Recorder(drops)
    text = "<think>hm</think>left"
    for history in ([user("hello")], [user("hello"), assistant(text), user("more")]):
        draft = recorder.draft(history, ())
        recorder.commit(draft, generation(drops, text), assistant(text), began=0, sampled=0)
    first, second = recorder.segments()
    assert (recorder.conversations, recorder.cuts) == (1, 1)
    assert set(first.turns.tolist()) == {-1, 0}
    assert set(second.turns.tolist()) == {-1, 1}
    assert drops.decode(second.token_ids).count("<think>") == 1


def test_a_template_that_wants_calls_in_structure_gets_them() -> None:
    wants = renderer("wants tool calls")
    recorder = Recorder(wants)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    recorder.commit(recorder.draft([user("1+1?")], ()), generation(wants, text), answer, began=0, sampled=0)
    history = [user("1+1?"), {**answer, "content": ""}, {"role": "tool", "tool_call_id": "c", "content": "2"}]
    draft = recorder.draft(history, ())
    prompt = wants.decode(draft.prompt_ids)
    assert '<call>{"name": "add", "arguments": {"a": 1}}</call>' in prompt
    recorder.commit(draft, generation(wants, "two"), assistant("two"), began=0, sampled=0)
    assert len(recorder.segments()) == 2  # the call was sampled in other words


def test_messages_that_the_template_refuses_change_nothing() -> None:
    wants = renderer("wants tool calls")
    recorder = Recorder(wants)
    recorder.commit(recorder.draft([user("hello")], ()), generation(wants, "fox"), assistant("fox"), began=0, sampled=0)
    history = [user("hello"), assistant("fox")]
    with pytest.raises(EnvError, match="a tool answered that was not called"):
        recorder.draft([*history, {"role": "tool", "tool_call_id": "c", "content": "2"}], ())
    draft = recorder.draft([*history, user("more")], ())
    recorder.commit(draft, generation(wants, "dog"), assistant("dog"), began=0, sampled=0)
    assert recorder.conversations == 1
