"""The commands that use what a run has trained: their options, and what each calls.

Nothing heavy is imported here: `roll-like --help` reads this file too.
"""

from __future__ import annotations

import argparse

from roll_like.errors import OK
from roll_like.metrics.commands import PORTS, Add, add_output_dir, number_within


def add_serving(add: Add) -> None:
    """Add `chat`, `serve` and `push`."""
    chat = add("chat", _chat, "talk to the model of a run in the terminal")
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message; default: that of the run's data")
    chat.add_argument(
        "--temperature",
        type=number_within(float, 0, 100),
        metavar="T",
        help="0 is greedy; default: that of the run's rollouts, else 1",
    )
    chat.add_argument(
        "--max-tokens", type=number_within(int, 1), default=512, metavar="N", help="longest answer (default: 512)"
    )

    serve = add("serve", _serve, "serve the model of a run with vLLM's OpenAI-compatible server")
    _add_model(serve)
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    serve.add_argument(
        "--port", type=number_within(int, *PORTS), default=8000, help="TCP port to listen on (default: 8000)"
    )
    serve.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="OPTION",
        help="option of `vllm serve`, such as --vllm=--max-model-len=2048",
    )

    push = add("push", _push, "upload the model of a run to the Hugging Face hub, with its card")
    _add_model(push)
    push.add_argument("repo", nargs="?", metavar="REPO", help="OWNER/NAME; default: your account, the run's name")
    push.add_argument("--public", action="store_true", help="let everyone read a new repository (default: private)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, its folder, or the directory of an exported model")
    add_output_dir(parser)


def _chat(arguments: argparse.Namespace) -> int:
    from roll_like.serving.chat import AGAIN, lines_of_a_terminal, start_chat, talk
    from roll_like.serving.trained import trained_model

    trained = trained_model(arguments.run, arguments.output_dir, command="chat")
    sampling = dict(trained.sampling)
    if arguments.temperature is not None:
        sampling["temperature"] = arguments.temperature
    system = trained.system_prompt if arguments.system is None else arguments.system
    print(f"{trained.name}, temperature {sampling.get('temperature', 1.0):g}; {AGAIN} begins anew, Ctrl-D ends")
    chat = start_chat(trained, sampling=sampling, max_tokens=arguments.max_tokens, system=system)
    talk(chat, lines_of_a_terminal(), prompt="> ")
    return OK


def _serve(arguments: argparse.Namespace) -> int:
    from roll_like.serving.serve import serve
    from roll_like.serving.trained import trained_model

    serve(
        trained_model(arguments.run, arguments.output_dir, command="serve"),
        arguments.host,
        arguments.port,
        arguments.vllm,
    )
    return OK


def _push(arguments: argparse.Namespace) -> int:
    from roll_like.serving.push import push
    from roll_like.serving.trained import trained_model

    trained = trained_model(arguments.run, arguments.output_dir, command="push", scores=True)
    address = push(trained.directory, arguments.repo or trained.name, public=arguments.public)
    print(f"{trained.directory} is at {address}")
    return OK
