"""Tiny Mixture-of-Experts models of transformers as a trainer has them: random, seeded, with a clear head.

Letters: B rows, S columns, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.tiny_checkpoints import QWEN3_CONFIG, TINY_CONFIG

_SIZES: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "vocab_size": 256,
}
TRAINER_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_CONFIG | {"vocab_size": 256},
    "deepseek_v3": TINY_CONFIG | {"vocab_size": 256},
    "mixtral": {"num_local_experts": 16, **_SIZES},
    "olmoe": {"num_experts": 16, **_SIZES},
}
FAMILIES = tuple(TRAINER_CONFIGS)
FURTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": _SIZES
    | {"num_experts": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "glm4_moe": _SIZES
    | {"n_routed_experts": 16, "moe_intermediate_size": 32, "head_dim": 16}
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    "gpt_oss": _SIZES | {"num_local_experts": 16, "head_dim": 16},
}
"""Families whose gates have the same contract."""


def tiny_trainer(family: str, *, seed: int = 0, experts: str = "eager", **overrides: Any) -> Any:
    """In float32 and eval mode. experts: which implementation of transformers computes them."""
    fields = (TRAINER_CONFIGS | FURTHER_CONFIGS)[family] | {"model_type": family} | overrides
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation=experts
    )
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * _scale(name, parameter))
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval()


def gates(model: Any) -> list[Any]:
    """Of the MoE layers, in order of depth."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def perturb_gates(model: Any, *, share: float, seed: int = 1) -> None:
    """Moves every gate's weights by a random step, of this share of their own size."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for gate in gates(model):
            step = torch.randn(gate.weight.shape, generator=draw).to(gate.weight.dtype)
            gate.weight.add_(share * gate.weight.float().std().to(step.dtype) * step)


def right_padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] and attention mask [B, S], both int64."""
    width = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences])
    return ids, mask


def left_padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    ids, mask = right_padded([s[::-1] for s in sequences])
    return ids.flip(1), mask.flip(1)


def token_logprobs(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """[B, S − 1] float32: of every token from the second on, given those before it."""
    logits = model(input_ids, attention_mask=attention_mask, use_cache=False).logits
    logprobs = logits[:, :-1].float().log_softmax(dim=-1)
    return logprobs.gather(-1, input_ids[:, 1:, None])[..., 0]


def _scale(name: str, parameter: Tensor) -> float:
    if "norm" in name or name.endswith("bias"):
        return 0.1
    if "embed_tokens" in name:
        return 1.0
    fan_in = float(parameter.shape[-1] ** -0.5)
    return 4.0 * fan_in if "lm_head" in name else fan_in
