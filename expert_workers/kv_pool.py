"""The KV memory of one rank: tensors only. Who owns which block is decided elsewhere."""

import torch
from torch import Tensor


class KVPool:
    """Rows of one width per layer and slot; slot = block id × block size + offset.

    rows: [num_layers, num_blocks · block_size, width]
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rows = torch.zeros(
            (num_layers, num_blocks * block_size, width), dtype=dtype, device=device
        )

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Overwrites. slots: [T] int64, all different; rows: [T, width]."""
        self.rows[layer].index_copy_(0, slots, rows)

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """A copy: [*slots.shape, width]. slots: int64 of any shape."""
        gathered = self.rows[layer].index_select(0, slots.flatten())
        return gathered.view(*slots.shape, -1)

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()
