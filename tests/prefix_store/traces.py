"""Mooncake's request traces as prompts: one trace id is one whole block of tokens, the last one as well.

A row has `timestamp` (ms), `input_length` and `output_length` (tokens of the traced model) and `hash_ids`, chained: an
id names a block together with everything before it.
"""

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.routes import ExpertRoutes, RouteShape
from prefix_store.store import PrefixStore
from tests.prefix_store.builders import NAMESPACE, RANK0, make_store

TRACE_BLOCK = 16
"""Tokens that stand for one id, which is a block of the store. In the traces it was 512."""
SHAPE = RouteShape(num_moe_layers=1, num_experts_per_tok=1, num_experts=8)
MAX_SYNTHETIC_BLOCKS = 40
"""Of the part that a row takes over: the plain twin keeps every prefix."""
_TRACED_BLOCK = 512


@dataclass(frozen=True)
class TraceRow:
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class Hits:
    blocks: int
    distinct_blocks: int
    hit_blocks: int
    full_rows: int
    """Rows whose every block hit."""


def read_rows(file: Path) -> list[TraceRow]:
    """Of a .jsonl or .jsonl.gz file, in its order."""
    data = file.read_bytes()
    text = gzip.decompress(data) if file.suffix == ".gz" else data
    return [_row(json.loads(line)) for line in text.splitlines()]


def _row(columns: dict[str, object]) -> TraceRow:
    hash_ids = columns.pop("hash_ids")
    assert isinstance(hash_ids, list)
    return TraceRow(hash_ids=tuple(hash_ids), **columns)  # type: ignore[arg-type]  # JSON integers


def synthetic_rows(seed: int, num_rows: int = 250) -> list[TraceRow]:
    """Conversations that go on, of a few openings, some of them sent twice; the same columns, chained ids."""
    rng = random.Random(seed)
    next_id = 0
    prompts: list[tuple[int, ...]] = [()]
    rows = []
    for number in range(num_rows):
        base = rng.choice(prompts[-40:])[:MAX_SYNTHETIC_BLOCKS]
        cut = rng.choice([len(base), rng.randint(0, len(base))])
        num_own = rng.choice([0, 1, rng.randint(1, 12)]) if cut else rng.randint(1, 12)
        hash_ids = (*base[:cut], *range(next_id, next_id + num_own))
        next_id += num_own
        prompts.append(hash_ids)
        last = rng.randint(1, _TRACED_BLOCK)
        length = _TRACED_BLOCK * (len(hash_ids) - 1) + last
        rows.append(TraceRow(3000 * (number // 4), length, rng.randint(1, 800), hash_ids))
    return rows


def token_ids_of(hash_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """[len(hash_ids) · TRACE_BLOCK] int32. Each token holds its id, so different ids have no token in common."""
    return np.repeat(np.array(hash_ids, np.int32), TRACE_BLOCK)


def make_trace_store(num_blocks: int) -> PrefixStore:
    return make_store(num_ranks=1, num_kv_blocks=num_blocks, shape=SHAPE, block_size=TRACE_BLOCK)


def hits_of_store(store: PrefixStore, rows: Iterable[TraceRow]) -> Hits:
    """Matches each row, then inserts it, before the next one."""
    blocks = hit_blocks = full_rows = 0
    distinct: set[int] = set()
    for row in rows:
        hit = _insert(store, token_ids_of(row.hash_ids))
        blocks += len(row.hash_ids)
        hit_blocks += hit
        full_rows += hit == len(row.hash_ids)
        distinct.update(row.hash_ids)
    return Hits(blocks, len(distinct), hit_blocks, full_rows)


def _insert(store: PrefixStore, token_ids: npt.NDArray[np.int32]) -> int:
    """A request from arrival to end, with routes that are the same everywhere. Returns how many blocks hit."""
    (num_kv_tokens,) = store.match(NAMESPACE, token_ids).num_kv_tokens
    lease = store.acquire(NAMESPACE, token_ids, num_kv_tokens)
    first, end = num_kv_tokens // TRACE_BLOCK, len(token_ids) // TRACE_BLOCK
    block_ids = store.allocate(RANK0, end - first)
    assert block_ids is not None
    dims = (len(token_ids) - num_kv_tokens, SHAPE.num_moe_layers, SHAPE.num_experts_per_tok)
    routes = ExpertRoutes(np.zeros(dims, SHAPE.id_dtype), np.zeros(dims, SHAPE.weight_dtype))
    publication = store.publish(lease, RANK0, token_ids, first, block_ids, routes)
    assert publication.outcomes == ("added",) * (end - first)
    store.release(lease)
    return first


def hits_of_dict(rows: Iterable[TraceRow]) -> Hits:
    """The plain twin: all prefixes seen so far, as tuples of their tokens."""
    seen: dict[tuple[int, ...], None] = {}
    blocks = hit_blocks = full_rows = 0
    for row in rows:
        tokens = tuple(token_ids_of(row.hash_ids).tolist())
        prefixes = [tokens[:end] for end in range(TRACE_BLOCK, len(tokens) + 1, TRACE_BLOCK)]
        hits = [prefix in seen for prefix in prefixes]
        hit = hits.index(False) if False in hits else len(hits)
        blocks, hit_blocks = blocks + len(hits), hit_blocks + hit
        full_rows += hit == len(hits)
        seen.update(dict.fromkeys(prefixes))
    return Hits(blocks, len(seen), hit_blocks, full_rows)
