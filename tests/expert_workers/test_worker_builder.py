"""Which placement a worker takes, and whose weights and whose text."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import ConfigError
from cluster.grammar import grammar_text
from cluster.logit_rules import LogitRules
from cluster.namespace import model_fingerprint
from cluster.worker_messages import KnownTokens, SequenceStart
from expert_workers.worker_builder import build_expert_worker, expert_placement
from tests.expert_workers.driving import SPEC, ChunkSpec, make_options, make_step
from tests.helpers.placements import redundant_placement
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint

NUM_EXPERTS = SPEC.gate.num_experts


def test_experts_lie_in_equal_runs_unless_told_otherwise() -> None:
    options = make_options(ep_size=4)
    given = redundant_placement(NUM_EXPERTS, 4, seed=1)
    assert expert_placement(options, SPEC).local_experts(3).tolist() == list(range(48, 64))
    assert expert_placement(replace(options, placement=given), SPEC) is given


@pytest.mark.parametrize(("num_experts", "ep_size"), [(NUM_EXPERTS - 1, 4), (NUM_EXPERTS, 2)])
def test_a_placement_of_another_size_is_refused_with_both(num_experts: int, ep_size: int) -> None:
    given = redundant_placement(num_experts, ep_size, seed=1)
    options = replace(make_options(ep_size=4), placement=given)
    reason = f"for {num_experts} experts on {ep_size} ranks, the cell has 64 on 4"
    with pytest.raises(ConfigError, match=reason):
        expert_placement(options, SPEC)


def test_a_rank_that_starts_with_other_weights_keeps_the_text_side_of_the_served_model(
    tmp_path: Path,
) -> None:
    served = write_tiny_checkpoint(tmp_path / "served", seed=1)
    weights_only = write_tiny_checkpoint(tmp_path / "weights_only", seed=2)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (weights_only / name).unlink()
    worker = build_expert_worker(
        replace(make_options(), model_dir=served, weights_dir=weights_only)
    )
    assert worker.identity.model_fingerprint == model_fingerprint(weights_only, "float32")
    start = SequenceStart(
        seq_id=0,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        barred_token_ids=(2,),
        barred_before=99,
        rules=LogitRules(grammar=grammar_text("choice", '[""]')),
        known=KnownTokens(3, 3, np.zeros(0, np.int32)),
    )
    worker.start_sequence(start)
    result = worker.execute(make_step(0, [ChunkSpec(0, [5, 6, 7], blocks=[0])])).result
    assert not result.failures
    assert list(result.token_ids) == [0]  # which generation_config.json alone names
