"""Qwen3-MoE: grouped-query attention with normed heads, softmax gate, dense layers anywhere, no shared experts."""

from cluster.model_config.family import MAX_EXPERTS, Family
from cluster.model_config.json_object import JsonObject
from cluster.model_config.rope import read_rope
from cluster.model_spec import GqaSpec, SoftmaxGateSpec


def _moe_layers(config: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer, but for those that `mlp_only_layers` names."""
    step = 1
    if "decoder_sparse_step" in config.values:
        step = config.integer("decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(_is_layer(layer, num_layers) for layer in dense):
        raise config.refuse("mlp_only_layers", f"a list of layer numbers below {num_layers}")
    moe_layers = [n for n in range(num_layers) if (n + 1) % step == 0 and n not in dense]
    if not moe_layers:
        key = "mlp_only_layers" if step <= num_layers else "decoder_sparse_step"
        raise config.refuse(key, "a value that leaves at least one layer with experts")
    return tuple(moe_layers)


def _is_layer(value: object, num_layers: int) -> bool:
    return type(value) is int and 0 <= value < num_layers


def _num_shared_experts(_: JsonObject) -> int:
    return 0


def _attention(config: JsonObject) -> GqaSpec:
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of the {num_heads} heads")
    head_dim = _head_dim(config, num_heads)
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_rope(config, dim=head_dim, interleaved=False),
        attention_bias=config.flag("attention_bias", default=False),
    )


def _head_dim(config: JsonObject, num_heads: int) -> int:
    """A rotation turns pairs, so an odd size has none."""
    if config.get("head_dim") is not None:
        head_dim = config.integer("head_dim")
        if head_dim % 2:
            raise config.refuse("head_dim", "an even number")
        return head_dim
    hidden_size = config.integer("hidden_size")
    head_dim = hidden_size // num_heads
    if head_dim < 2 or head_dim % 2:
        raise config.refuse(
            "head_dim",
            f"an even number; hidden_size / num_attention_heads = {hidden_size} / {num_heads} is none",
        )
    return head_dim


def _gate(config: JsonObject) -> SoftmaxGateSpec:
    num_experts = config.integer(
        config.spelling("num_experts", "num_local_experts"), high=MAX_EXPERTS
    )
    num_experts_per_tok = config.integer("num_experts_per_tok")
    if num_experts_per_tok > num_experts:
        raise config.refuse("num_experts_per_tok", f"at most the {num_experts} experts")
    return SoftmaxGateSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        norm_topk_prob=config.flag("norm_topk_prob", default=False),
    )


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    switches={
        "hidden_act": "silu",
        "quantization_config": None,
        "use_qk_norm": True,
        "use_sliding_window": False,
    },
    inert_keys=frozenset(["max_window_layers", "sliding_window"]),  # of a window that is not used
    moe_layers=_moe_layers,
    num_shared_experts=_num_shared_experts,
    attention=_attention,
    gate=_gate,
)
