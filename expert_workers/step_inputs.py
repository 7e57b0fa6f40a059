"""What one rank's forward pass gets: its share of a step as tensors. Built once per step from the descriptor."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepInputs:
    """T tokens of C chunks on this rank, flattened: chunks whose routes the gate chooses, then those that replay
    through a negotiated dispatch, then the planned ones.

    T may be 0: the rank still takes part in every exchange.

    input_ids:        [T] int64
    positions:        [T] int64, position of each token in its sequence
    slot_mapping:     [T'] int64, where each written token's KV goes: block id × block size + offset
    cu_seqlens_q:     [C + 1] Python ints, chunk c owns tokens [cu_seqlens_q[c], cu_seqlens_q[c + 1])
    seq_lens:         [C] Python ints, tokens of the sequence whose KV exists once this step's are written
    block_tables:     [C] tensors [num_blocks] int64, the sequence's blocks from position 0
    num_gate_tokens:  G; tokens [0, G) go through the gate
    replay_topk_ids:     [N, L, K] int64 of tokens [G, G + N), logical expert ids sorted within a token
    replay_topk_weights: [N, L, K] float32; tokens from G + N on are planned and need neither
    last_token_indices:  [S] int64, rows of the tokens whose next token is sampled, in chunk order
    written_tokens:      [T'] int64, rows of the tokens whose KV is written; None: all. The KV of the others is there
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: tuple[Tensor, ...]
    num_gate_tokens: int
    replay_topk_ids: Tensor
    replay_topk_weights: Tensor
    last_token_indices: Tensor
    written_tokens: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def device(self) -> torch.device:
        return self.input_ids.device
