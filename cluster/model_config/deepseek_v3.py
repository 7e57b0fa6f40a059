"""DeepSeek-V3: latent attention, sigmoid gate with groups, dense layers first, shared experts."""

from cluster.model_config.family import MAX_EXPERTS, Family
from cluster.model_config.json_object import JsonObject
from cluster.model_config.rope import read_rope
from cluster.model_spec import MlaSpec, SigmoidGateSpec


def _moe_layers(config: JsonObject, num_layers: int) -> tuple[int, ...]:
    num_dense_layers = config.integer("first_k_dense_replace", low=0)
    if num_dense_layers >= num_layers:
        raise config.refuse("first_k_dense_replace", f"less than num_hidden_layers = {num_layers}")
    return tuple(range(num_dense_layers, num_layers))


def _num_shared_experts(config: JsonObject) -> int:
    return config.integer_or_null("n_shared_experts", low=0) or 0


def _attention(config: JsonObject) -> MlaSpec:
    num_heads = config.integer("num_attention_heads")
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    if rope % 2:
        raise config.refuse("qk_rope_head_dim", "an even number")
    implied = {"num_key_value_heads": num_heads, "qk_head_dim": nope + rope, "head_dim": rope}
    for key, value in implied.items():
        if config.get(key) not in (None, value):
            raise config.refuse(key, f"{value}, which the other sizes imply")
    interleaved = config.flag("rope_interleave", default=True)
    return MlaSpec(
        num_heads=num_heads,
        q_lora_rank=config.integer_or_null("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        v_head_dim=config.integer("v_head_dim"),
        rope=read_rope(config, dim=rope, interleaved=interleaved),
        attention_bias=config.flag("attention_bias", default=False),
    )


def _gate(config: JsonObject) -> SigmoidGateSpec:
    """Shapes that no group-limited top-k can serve are refused here, before any weight is read."""
    num_experts = config.integer(
        config.spelling("n_routed_experts", "num_local_experts"), high=MAX_EXPERTS
    )
    num_groups, topk_group = config.integer("n_group"), config.integer("topk_group")
    num_experts_per_tok = config.integer("num_experts_per_tok")
    group_size, rest = divmod(num_experts, num_groups)
    if rest or group_size < 2:
        raise config.refuse(
            "n_group",
            f"a divisor of the {num_experts} routed experts that leaves at least 2 experts in a "
            "group (a group is scored by its best two)",
        )
    if topk_group > num_groups:
        raise config.refuse("topk_group", f"at most n_group = {num_groups}")
    if num_experts_per_tok > topk_group * group_size:
        kept = f"{topk_group * group_size} experts of the topk_group = {topk_group} kept groups"
        raise config.refuse("num_experts_per_tok", f"at most the {kept}")
    return SigmoidGateSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        num_groups=num_groups,
        topk_group=topk_group,
        norm_topk_prob=config.flag("norm_topk_prob", default=True),
        routed_scaling_factor=config.number("routed_scaling_factor", default=2.5),
    )


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    switches={
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "quantization_config": None,
    },
    inert_keys=frozenset(
        ["aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "seq_aux"]
    ),
    moe_layers=_moe_layers,
    num_shared_experts=_num_shared_experts,
    attention=_attention,
    gate=_gate,
)
