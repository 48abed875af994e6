"""A transformers model's layers as Megatron-Core's, for the stages of a pipeline that one rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from roll_like.config.training import TrainerConfig
from roll_like.models.megatron_plan import LATENT, Mixture, head_width, layers_of_stages, output_bias, window_of
from roll_like.models.router import UNKNOWN
from roll_like.training.joined import KERNELS, JoinedAttention, joined_attention, joined_attention_forward
from roll_like.training.megatron_latent import LatentAttention
from roll_like.training.megatron_weights import Place
from roll_like.training.segments import RowSegments

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class NextStage(Exception):
    """Ends a forward pass of a stage that is not the last: `states` go to the next one."""

    def __init__(self, states: Tensor) -> None:
        super().__init__("the layers of this stage are done")
        self.states = states


@dataclass(frozen=True, slots=True)
class States:
    """What a backbone returns, as transformers calls it."""

    last_hidden_state: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class LayerRows:
    """What a micro-batch's layers are told beside hidden states.

    Attributes:
        segments: What tokens may see.
        routes_TMK: Experts of the tokens that this rank's experts layers see, of all M layers of the model; −1 where
            the layers are to choose. None where they choose everywhere.
    """

    segments: RowSegments
    routes_TMK: Tensor | None


class Routes:
    """The experts that a rank's layers take: given, or their own choice. What objectives call a router."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.given_TMK: Tensor | None = None
        self._counts: Tensor | None = None  # of given experts: those that the layers would not have chosen, and all
        for chunk in chunks:
            for index, layer in enumerate(chunk.decoder.layers):
                if not layer.is_moe_layer:
                    continue
                choice = ExpertChoice(self, index + first_layer(chunk))
                layer.mlp.router.router_replay = choice
                layer.register_forward_pre_hook(choice.enter, with_kwargs=True)

    def give(self, routes_TMK: Tensor | None) -> None:
        """Let the next forward pass use these experts, also where it is computed again (`RouterReplay.give`)."""
        self.given_TMK, self._counts = routes_TMK, None

    def own(self, more: int) -> Tensor | None:
        """Return those of the tokens that this rank's experts layers see, after `more` tokens were filled up."""
        if self.given_TMK is None:
            return None
        group = parallel_state.get_tensor_model_parallel_group()
        filled_TMK = nn.functional.pad(self.given_TMK, (0, 0, 0, 0, 0, more), value=UNKNOWN)
        own_TMK: Tensor = filled_TMK.chunk(group.size())[group.rank()]
        return own_TMK

    def disagreement(self, _: Any = None) -> tuple[float, int]:
        """Return what `RouterReplay.disagreement` does, of the layers of this stage; all its ranks ask together."""
        counts = torch.zeros(2, device=torch.cuda.current_device()) if self._counts is None else self._counts.float()
        torch.distributed.all_reduce(counts, group=parallel_state.get_tensor_and_context_parallel_group())
        other, given = counts.tolist()
        return (other / given if given else 0.0), int(given)

    def count(self, other: Tensor, given: Tensor) -> None:
        """Count given experts, and those of them that a layer would not have chosen."""
        counts = torch.stack([other.sum(), given.sum()])
        self._counts = counts if self._counts is None else self._counts + counts


class ExpertChoice:
    """What chooses the experts in one layer; Megatron-Core asks it as it asks its own `RouterReplay`."""

    def __init__(self, routes: Routes, layer: int) -> None:
        self.layer_number: int | None = None  # Megatron-Core's own count
        self._routes = routes
        self._layer = layer
        self._given_TK: Tensor | None = None

    def enter(self, _: nn.Module, __: Any, told: dict[str, Any]) -> None:
        """Take the routes of the micro-batch whose turn it is in this layer, also in a backward pass."""
        routes_TMK = told["attention_bias"].routes_TMK
        self._given_TK = None if routes_TMK is None else routes_TMK[:, self._layer]

    def get_replay_topk(
        self, scores_TE: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None, default: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the experts: the given ones with their own scores, else the best."""
        best_TK, indices_TK = default(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        given_TK = self._given_TK
        if given_TK is None:
            return best_TK, indices_TK
        known_TK = given_TK >= 0
        missed_TK = known_TK & ~(given_TK[:, :, None] == indices_TK[:, None, :]).any(-1)
        self._routes.count(missed_TK, known_TK)
        chosen_TK = torch.where(known_TK, given_TK, indices_TK)
        return scores_TE.gather(1, chosen_TK), chosen_TK


class Norm(nn.RMSNorm):
    """An RMSNorm of part of the tokens or of part of the heads: tensor ranks add its gradients up."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel


class RowAttention(nn.Module):
    """Attention over joined rows (`joined.py`); Megatron-Core's own knows no prompts that samples share.

    What tokens may see comes as `attention_bias` (`LayerRows`): Megatron-Core keeps that for layers it computes again.

    Args:
        layer_number: The model's layer, from 1.
    """

    sinks: nn.Parameter | None

    def __init__(
        self, kind: JoinedAttention, model: Any, scale: float, *_: Any, config: Any, layer_number: int, **__: Any
    ) -> None:
        super().__init__()
        self.kernel = KERNELS[kind]
        self.scale = scale
        self.window = window_of(model, layer_number - 1)
        self.sinks = None
        if model.model_type == "gpt_oss":
            own = model.num_attention_heads // config.tensor_model_parallel_size
            device = torch.cuda.current_device()
            self.sinks = nn.Parameter(torch.empty(own, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.sinks, is_parallel=True, dim=0, stride=1)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, attention_bias: LayerRows, **__: Any
    ) -> Tensor:
        """Return the output of tokens [T, 1, H, D], shape [T, 1, H·D]; those beyond the rows' own get zeros."""
        segments = attention_bias.segments
        tokens = _own_tokens(segments)
        query, key, value = (each[:tokens].permute(1, 2, 0, 3) for each in (query, key, value))
        output_1THE = joined_attention_forward(
            self.kernel,
            self,
            query,
            key,
            value,
            None,
            row_segments=segments,
            scaling=self.scale,
            sliding_window=self.window,
            s_aux=self.sinks,
        )[0]
        output_T1D = output_1THE.flatten(2).transpose(0, 1)
        return nn.functional.pad(output_T1D, (0, 0, 0, 0, 0, _filled(tokens) - tokens))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Say to Megatron-Core's checkpoints which part of the sinks this rank has."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"sinks": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class Positions(nn.Module):
    """The angles of rotary embeddings at the positions of a micro-batch's tokens.

    Attributes:
        positions_T: Of those that are computed now.
    """

    positions_T: Tensor

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", inverse_frequencies.float(), persistent=False)

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Return nothing of interest: positions are given."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return angles, shape [T, 1, 1, D]."""
        angles_TD = torch.outer(self.positions_T.float(), cast(Tensor, self.frequencies))
        return torch.cat([angles_TD, angles_TD], -1)[:, None, None]


@dataclass(slots=True)
class Backbone:
    """Stands for the backbone of a transformers model, on the chunk whose turn it is.

    Attributes:
        config: The transformers model's.
        chunk: That chunk, within its wrapper for data parallelism where it is trained.
        routes: The experts that layers are given; None where they always choose.
    """

    config: PretrainedConfig
    chunk: Any = None
    routes: Routes | None = None

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, row_segments: RowSegments, **_: Any) -> States:
        """Return the last hidden states, shape [1, T, D].

        Raises:
            NextStage: The chunk's layers are not the last ones.
        """
        tokens = input_ids.shape[1]
        more = _filled(tokens) - tokens
        input_ids, position_ids = (nn.functional.pad(each, (0, more)) for each in (input_ids, position_ids))
        model = unwrapped(self.chunk)
        model.rotary_pos_emb.positions_T = position_ids[0]
        states_T1D = self.chunk(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            extra_block_kwargs={
                "attention_bias": LayerRows(row_segments, self.routes.own(more) if self.routes else None)
            },
            output_processor=_last_states,
        )
        if not model.post_process:
            raise NextStage(states_T1D)
        return States(states_T1D[:tokens].transpose(0, 1))


def _last_states(*, hidden_states: Tensor, config: Any, **_: Any) -> Tensor:
    """Return the states of all tokens; what is computed of them is the same on all tensor ranks."""
    if not config.sequence_parallel:
        return hidden_states
    whole: Tensor = gather_from_sequence_parallel_region(
        hidden_states, tensor_parallel_output_grad=False, group=parallel_state.get_tensor_model_parallel_group()
    )
    return whole


def _own_tokens(segments: RowSegments) -> int:
    tokens = len(segments.sequences.kept_T)
    if segments.parallel is None:
        return tokens
    return -(-tokens // segments.parallel.size)


def _filled(tokens: int) -> int:
    """Return how many tokens layers compute: tensor ranks divide them evenly."""
    size = int(parallel_state.get_tensor_model_parallel_world_size())
    return -(-tokens // size) * size


def transformer_config(config: Any, settings: TrainerConfig, dtype: torch.dtype) -> Any:
    """Return Megatron-Core's description of a transformers model that `refuse_no_converter` lets pass."""
    pipeline, virtual = settings.pipeline_parallel, settings.virtual_pipeline
    more: dict[str, Any] = {}
    mixture = Mixture.of(config)
    if mixture is not None:
        more |= {
            "num_moe_experts": mixture.experts,
            "moe_router_topk": mixture.active,
            "moe_ffn_hidden_size": mixture.width,
            "moe_shared_expert_intermediate_size": mixture.shared or None,
            "moe_layer_freq": 1 if all(mixture.layers) else [int(each) for each in mixture.layers],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "moe_router_score_function": "sigmoid" if mixture.sigmoid else "softmax",
            "moe_router_pre_softmax": not mixture.normalised,
            "moe_router_topk_scaling_factor": mixture.factor,
            "moe_router_num_groups": mixture.groups or None,
            "moe_router_group_topk": mixture.best or None,
            "moe_router_dtype": "fp32",
            "expert_tensor_parallel_size": settings.expert_tensor_parallel,
            "moe_permute_fusion": False,
        }
    if config.model_type == "gpt_oss":
        more |= {
            "add_bias_linear": True,
            "activation_func": partial(_bent_sigmoid_unit, config.swiglu_alpha),
            "activation_func_clamp_value": config.swiglu_limit,
            "glu_linear_offset": 1.0,
        }
    counts = layers_of_stages(config.num_hidden_layers, pipeline * virtual)
    if min(counts) < max(counts):
        stages = [["decoder"] * count for count in counts]
        more["pipeline_model_parallel_layout"] = [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]
    if virtual > 1:
        # batched sends between two ranks are taken for each other, and gradients are wrong without an error
        more |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if settings.gradient_checkpointing:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    bias = bool(getattr(config, "attention_bias", False))
    common: dict[str, Any] = {"add_bias_linear": False, "activation_func": nn.functional.silu, **more}
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_width(config),
        ffn_hidden_size=config.intermediate_size,
        gated_linear_unit=True,
        add_qkv_bias=config.model_type == "qwen2" or bias,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type.startswith("qwen3") or getattr(config, "use_qk_norm", False),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=settings.tensor_parallel,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        expert_model_parallel_size=settings.expert_parallel,
        context_parallel_size=settings.sequence_parallel,
        sequence_parallel=settings.tensor_parallel > 1,
        variable_seq_lengths=pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # also of dense models: `variable_seq_lengths` asks for it
        calculate_per_token_loss=True,  # losses add up over micro-batches and ranks
        perform_initialization=False,
        **common,
    )


def _bent_sigmoid_unit(slope: float, gate: Tensor) -> Tensor:
    """Return gpt-oss's activation: a SiLU whose sigmoid is steeper."""
    return gate * torch.sigmoid(gate * slope)


def _layer(config: Any, described: Any, attention: JoinedAttention, first: Any, experts: int | None) -> Any:
    """Return what makes a layer of a chunk: Megatron-Core's own without Transformer Engine, and the above.

    Args:
        described: What `transformer_config` returned.
        first: The transformers model's attention in its first layer.
        experts: Experts of the layer; None for none.
    """
    layer = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=described.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    core = partial(RowAttention, attention, config, first.scaling)
    if config.model_type in LATENT:
        norm = partial(Norm, eps=first.kv_a_layernorm.variance_epsilon)
        layer.submodules.self_attention = ModuleSpec(
            LatentAttention, params={"model": config, "core": core, "norm": norm}
        )
        return layer
    inside = layer.submodules.self_attention.submodules
    inside.core_attention = core
    if described.qk_layernorm:
        inside.q_layernorm = inside.k_layernorm = Norm
    if output_bias(config):
        inside.linear_proj = _biased
    return layer


def _biased(*sizes: Any, **options: Any) -> Any:
    """Return the output projection of attention with a bias."""
    return RowParallelLinear(*sizes, **{**options, "bias": True})


def build_chunks(
    config: Any,
    described: Any,
    *,
    attention: JoinedAttention,
    backbone: Any,
    vocabulary: int,
    tied: bool,
    head: bool,
) -> list[Any]:
    """Return the chunks of the model that this rank has: one, or one for each virtual stage.

    Args:
        described: What `transformer_config` returned.
        backbone: The transformers model without its output; nothing but its buffers and settings is read.
        vocabulary: Rows of the embedding: its tokens, and what fills them up to what ranks divide.
        tied: Whether the embedding is the output projection, too.
        head: Whether the model has an output projection.
    """
    first = backbone.layers[0].self_attn
    dense, sparse = (
        _layer(config, described, attention, first, experts) for experts in (None, described.num_moe_experts)
    )
    mixture = Mixture.of(config)
    layers = [sparse if mixture is not None and mixture.layers[each] else dense for each in range(described.num_layers)]
    stages = described.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(stages or 1):
        virtual = stage if stages else None
        start = get_transformer_layer_offset(described, vp_stage=virtual)
        own = layers[start : start + get_num_layers_to_build(described, vp_stage=virtual)]
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual)
        chunk = GPTModel(
            described,
            TransformerBlockSubmodules(layer_specs=own, layer_norm=Norm),
            vocab_size=vocabulary,
            max_sequence_length=config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=tied and head,
            position_embedding_type="rope",
            vp_stage=virtual,
        )
        if last and not head:
            chunk.output_layer = None
        chunk.rotary_pos_emb = Positions(backbone.rotary_emb.inv_freq.to(torch.cuda.current_device()))
        _settle_layers(chunk.decoder.layers, backbone.layers[start:], backbone.rotary_emb.attention_scaling)
        if chunk.pre_process:
            words = chunk.embedding.word_embeddings
            words.forward = partial(_embed, words, config.pad_token_id)
        chunks.append(chunk)
    return chunks


def _settle_layers(layers: Sequence[Any], theirs: Sequence[Any], rotary_factor: float) -> None:
    """Give a chunk's layers what they have no argument for.

    Args:
        rotary_factor: What sines and cosines of rotary embeddings are multiplied with (YaRN).
    """
    for layer, other in zip(layers, theirs, strict=False):
        attention = layer.self_attention
        name = "rotary_factor" if isinstance(attention, LatentAttention) else "_yarn_concentration_factor"
        assert hasattr(attention, name), "Megatron-Core calls it otherwise"
        setattr(attention, name, rotary_factor)
        if not layer.is_moe_layer:
            continue
        chosen_by = getattr(getattr(other.mlp, "gate", None), "e_score_correction_bias", None)
        if chosen_by is not None:
            router = layer.mlp.router
            del router.expert_bias  # none; Megatron-Core would train one of its own
            router.register_buffer("expert_bias", chosen_by.to(torch.cuda.current_device(), torch.float32))
        for expert in layer.mlp.experts.local_experts if layer.config.add_bias_linear else ():
            output = expert.linear_fc2
            output.bias.sequence_parallel = False  # tensor ranks have other experts, or the same ones as replicas
            output.explicit_expert_comm = True  # the bias is added in place, which a result of collectives refuses


def _embed(words: Any, padding: int | None, token_ids_BL: Tensor) -> Tensor:
    """Return embeddings, [T, B, D] of this rank's tokens where tensor ranks divide them.

    The row of the padding token gets no gradient, as in transformers; Megatron-Core knows none.
    """
    first, end = words.vocab_start_index, words.vocab_end_index
    inside_BL = (token_ids_BL >= first) & (token_ids_BL < end)
    inner = padding - first if padding is not None and first <= padding < end else None
    found_BLD = nn.functional.embedding((token_ids_BL - first) * inside_BL, words.weight, inner)
    if not words.reduce_scatter_embeddings:
        return found_BLD
    own: Tensor = reduce_scatter_to_sequence_parallel_region(
        (found_BLD * inside_BL[..., None]).transpose(0, 1).contiguous(), group=words.tp_group
    )
    return own


def unwrapped(chunk: Any) -> Any:
    """Return a chunk itself."""
    return chunk if isinstance(chunk, GPTModel) else chunk.module


def first_layer(chunk: Any) -> int:
    """Return which of the model's layers a chunk calls 0."""
    return int(get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage))


def own_place(config: Any) -> Place:
    """Return which part of a transformers model's weights this rank has."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return Place(
        tensor=groups.tp,
        expert_tensor=groups.expt_tp,
        expert=groups.ep,
        queries=config.num_attention_heads,
        groups=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        family=config.model_type,
    )


def output_weight(chunks: Sequence[Any]) -> nn.Parameter | None:
    """Return this rank's part of the output projection; None where it has not the last layers."""
    last = chunks[-1]
    if not last.post_process or last.output_layer is None:
        return None
    tied = last.share_embeddings_and_output_weights
    found: nn.Parameter = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
    return found


def attention_of(model: Any) -> JoinedAttention:
    """Return how a transformers model's layers compute attention, which joins rows."""
    found = joined_attention(model)
    assert found is not None, "the rule of `attention` lets no other pass"
    return found
