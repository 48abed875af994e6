"""The date that chat templates write."""

from __future__ import annotations

import pickle
from datetime import date

from tiny_model import make_tiny_tokenizer

from roll_like.data.chat import Renderer

DATED = "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_a_template_writes_the_date_of_the_run() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = DATED
    messages = [{"role": "user", "content": "Hi"}]
    render = Renderer(tokenizer, date=date(2026, 1, 2))
    assert render.render(messages, ()) == "02 Jan 2026\nuser: Hi\n"
    assert pickle.loads(pickle.dumps(render)).render(messages, ()) == "02 Jan 2026\nuser: Hi\n"
    assert Renderer(tokenizer).render(messages, ()).startswith(date.today().strftime("%d %b %Y"))
    assert Renderer(tokenizer, date=date(2026, 1, 3)).fingerprint != render.fingerprint
    assert Renderer(tokenizer, date=date(2026, 1, 2)).fingerprint == render.fingerprint


def test_the_date_is_of_no_consequence_where_it_is_not_written() -> None:
    first, second = (Renderer(make_tiny_tokenizer(), date=date(2026, 1, day)) for day in (2, 3))
    assert first.fingerprint == second.fingerprint
