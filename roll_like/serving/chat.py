"""A conversation with what a run has trained, in the terminal: transformers on this machine's GPU or CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll_like.config.model import ModelConfig
from roll_like.models.imports import quiet
from roll_like.models.load import load_renderer
from roll_like.models.rotary import fix_frequencies
from roll_like.serving.trained import TrainedModel

if TYPE_CHECKING:
    from roll_like.data.chat import Renderer

#: What ends a conversation and begins a new one.
AGAIN = "/new"


@dataclass
class Chat:
    """A conversation.

    Attributes:
        model: The model, as transformers loads it.
        renderer: Its tokenizer and chat template.
        sampling: How tokens are drawn, by transformers' names. Temperature 0 is greedy; what is missing is 1, or off.
        max_tokens: Longest answer.
        system: The system message, if there is one.
    """

    model: Any
    renderer: Renderer
    sampling: Mapping[str, float]
    max_tokens: int
    system: str | None = None
    _messages: list[dict[str, str]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Begin."""
        self.begin()

    def begin(self) -> None:
        """Forget what was said."""
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str) -> str:
        """Write the answer to standard output while it is sampled, and return it."""
        import torch
        from transformers import TextStreamer

        tokenizer = self.renderer.tokenizer
        self._messages.append({"role": "user", "content": text})
        ids = self.renderer.encode(self.renderer.render(self._messages, ()))
        prompt = torch.tensor([list(map(int, ids))], device=self.model.device)
        greedy = self.sampling.get("temperature") == 0
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, **self.sampling}
        with torch.inference_mode():
            answer = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.max_tokens,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                **sampling,
            )
        found: str = tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": found})
        return found


def start_chat(trained: TrainedModel, *, sampling: Mapping[str, float], max_tokens: int, system: str | None) -> Chat:
    """Load the model, on a GPU if there is one.

    How tokens are drawn is said in each answer: of its `generation_config.json`, which the starting model's authors
    have written, special tokens alone are heeded.

    Raises:
        ConfigError: It has no tokenizer or no chat template, or transformers cannot load it.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = ModelConfig(path=str(trained.directory), template_options=dict(trained.template_options))
    renderer = load_renderer(config)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(str(trained.directory), dtype="auto", local_files_only=True)
    if trained.window is not None:
        fix_frequencies(model, trained.window)
    stated = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=stated.bos_token_id, eos_token_id=stated.eos_token_id, pad_token_id=stated.pad_token_id
    )
    if torch.cuda.is_available():
        model = model.to("cuda")
    return Chat(model.eval(), renderer, sampling, max_tokens, system)


def talk(chat: Chat, lines: Iterable[str], *, prompt: str) -> None:
    """Answer line by line until there are no more.

    Args:
        lines: What a person says; `AGAIN` begins anew.
        prompt: Written before each line is read.
    """
    said = iter(lines)
    while True:
        print(prompt, end="", flush=True)
        line = next(said, None)
        if line is None:
            print()
            return
        text = line.strip()
        if text == AGAIN:
            chat.begin()
        elif text:
            chat.say(text)


def lines_of_a_terminal() -> Iterable[str]:
    """Yield lines of standard input; with editing and history where that is a terminal."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 - `input` edits lines with it

    while True:
        try:
            yield input()
        except EOFError:
            return
