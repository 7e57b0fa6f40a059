"""One rank's model without an engine: chunks of named sequences in, logits and routes out."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.model_config.read import read_model_spec
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from expert_workers.dispatch.local import LocalDispatcher
from expert_workers.kv_pool import KVPool
from expert_workers.model.numerics import Numerics
from expert_workers.model.transformer import Transformer
from expert_workers.model.weights import ModelWeights, WeightTarget, load_weights
from expert_workers.route_recorder import StepRoutes
from expert_workers.step_inputs import StepInputs
from expert_workers.stopwatch import Stopwatch

CPU = torch.device("cpu")
BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 160


@dataclass(frozen=True)
class Chunk:
    """Tokens of sequence number `seq` from `first_position`; `replay`: their routes, else the gate chooses."""

    seq: int
    token_ids: list[int]
    first_position: int = 0
    replay: ExpertRoutes | None = None

    @property
    def num_kv_tokens(self) -> int:
        return self.first_position + len(self.token_ids)


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """logits: [T, V] of every token of the step; routes: of the gate's tokens; poisoned: [T] bool."""

    logits: Tensor
    routes: ExpertRoutes
    poisoned: Tensor
    stopwatch: Stopwatch


class ModelRunner:
    """Owner of a KV pool with room for `num_seqs` sequences, whose blocks are scattered over it."""

    def __init__(
        self,
        model_dir: Path,
        numerics: Numerics,
        *,
        num_seqs: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = read_model_spec(model_dir)
        self.numerics = numerics
        self.placement = ExpertPlacement.contiguous(self.spec.gate.num_experts, 1)
        target = WeightTarget(self.placement, 0, dtype, CPU)
        self.use_weights(load_weights(model_dir, self.spec, target))
        self.kv_pool = KVPool(
            num_layers=self.spec.num_layers,
            num_blocks=num_seqs * BLOCKS_PER_SEQUENCE,
            block_size=BLOCK_SIZE,
            width=self.spec.attention.kv_width,
            dtype=dtype,
            device=CPU,
        )
        shuffled = torch.randperm(
            self.kv_pool.num_blocks, generator=torch.Generator().manual_seed(7)
        )
        self.block_tables = shuffled.view(num_seqs, BLOCKS_PER_SEQUENCE)

    def use_weights(self, weights: ModelWeights) -> None:
        self.weights = weights
        self.transformer = Transformer(self.spec, weights, self.numerics)

    def step(self, chunks: list[Chunk]) -> StepOutcome:
        """Chunks whose routes the gate chooses must come first."""
        inputs = self.step_inputs(chunks)
        stopwatch = Stopwatch()
        step_routes = StepRoutes(inputs, self.spec.route_shape, stopwatch)
        dispatcher = LocalDispatcher(self.placement, CPU)
        logits = self.transformer.forward(inputs, self.kv_pool, step_routes, dispatcher, stopwatch)
        return StepOutcome(logits, step_routes.recorded(), step_routes.poisoned_tokens(), stopwatch)

    def kv_rows(self, seq: int, num_tokens: int) -> Tensor:
        """[layers, num_tokens, width] in order of position."""
        slots = self._slots(seq, 0, num_tokens)
        return self.kv_pool.rows[:, slots]

    def _slots(self, seq: int, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        blocks = self.block_tables[seq][positions // BLOCK_SIZE]
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    def step_inputs(self, chunks: list[Chunk]) -> StepInputs:
        lengths = [len(chunk.token_ids) for chunk in chunks]
        gate_lengths = [len(c.token_ids) for c in chunks if c.replay is None]
        shape = self.spec.route_shape
        replays = [chunk.replay for chunk in chunks if chunk.replay is not None]
        replay = ExpertRoutes.concatenate(replays, shape)
        num_tokens = sum(lengths)
        return StepInputs(
            input_ids=torch.tensor([t for c in chunks for t in c.token_ids], dtype=torch.int64),
            positions=_concatenated(
                [torch.arange(c.first_position, c.num_kv_tokens) for c in chunks]
            ),
            slot_mapping=_concatenated(
                [self._slots(c.seq, c.first_position, c.num_kv_tokens) for c in chunks]
            ),
            cu_seqlens_q=tuple(int(n) for n in np.cumsum([0, *lengths])),
            seq_lens=tuple(chunk.num_kv_tokens for chunk in chunks),
            block_tables=tuple(
                self.block_tables[c.seq][: -(-c.num_kv_tokens // BLOCK_SIZE)] for c in chunks
            ),
            num_gate_tokens=sum(gate_lengths),
            replay_topk_ids=torch.from_numpy(replay.topk_ids.astype(np.int64)),
            replay_topk_weights=torch.from_numpy(replay.topk_weights.astype(np.float32)),
            last_token_indices=torch.arange(num_tokens),
        )


def _concatenated(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def whole_prompt(runner: ModelRunner, token_ids: list[int]) -> StepOutcome:
    """The sequence as one chunk of sequence 0."""
    return runner.step([Chunk(0, token_ids)])


def prompt_tokens(num_tokens: int, *, seed: int, vocab_size: int = 3072) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()
    return tokens
