"""A burst of requests with one long prefix on four ranks: one computation with the gate, a replay per other rank."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.api import CellApi, random_prompt

pytestmark = pytest.mark.ray
NUM_REQUESTS = 64
PREFIX_TOKENS = 2000
"""125 whole blocks."""
NUM_RANKS = 4
MAX_TOKENS = 16


def test_a_burst_computes_its_prefix_once_and_spreads_over_the_ranks(api: CellApi) -> None:
    prefix = random_prompt(1, PREFIX_TOKENS)
    prompts = [prefix + random_prompt(1000 + n, 10 + n % 11) for n in range(NUM_REQUESTS)]
    before = api.metrics()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        burst = list(pool.map(lambda prompt: api.complete(prompt, MAX_TOKENS), prompts))
    after = api.metrics()

    def rise(name: str, *labels: str) -> float:
        key = (f"pointsman_{name}", labels)
        return after[key] - before.get(key, 0.0)

    own_tokens = sum(len(prompt) - PREFIX_TOKENS for prompt in prompts)
    decoded = NUM_REQUESTS * (MAX_TOKENS - 1)
    assert rise("gate_tokens_total") == PREFIX_TOKENS + own_tokens + decoded

    ranks = [str(rank) for rank in range(NUM_RANKS)]
    replayed = [rise("rank_tokens_total", rank, "replayed") for rank in ranks]
    gated = [rise("rank_tokens_total", rank, "computed") for rank in ranks]
    cached = [rise("rank_tokens_total", rank, "cached") for rank in ranks]
    print(f"by rank: gate {gated}, replayed {replayed}, cached {cached}")
    print(f"requests by rank: about {[round(c / PREFIX_TOKENS, 1) for c in cached]} with a KV hit")
    assert all(tokens <= PREFIX_TOKENS for tokens in replayed)

    busy = [g + r for g, r in zip(gated, replayed, strict=True)]
    print(f"busiest over mean, tokens: {max(busy) / (sum(busy) / NUM_RANKS):.3f}")
    assert max(busy) / (sum(busy) / NUM_RANKS) <= 1.3

    alone = [api.complete(prompt, MAX_TOKENS) for prompt in prompts[::4]]
    assert [a["choices"][0]["text"] for a in burst[::4]] == [a["choices"][0]["text"] for a in alone]
