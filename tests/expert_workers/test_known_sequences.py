"""What a rank remembers of a sequence's tokens: by position, whatever steps brought them and however often."""

import numpy as np
import pytest

from cluster.errors import GrammarError
from cluster.grammar import grammar_text, load_grammar_compiler
from cluster.logit_rules import LogitRules
from cluster.worker_messages import KnownTokens, SequenceStart
from expert_workers.inputs_from_step import Chunk, StepRefusedError
from expert_workers.known_sequences import KnownSequences
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

PROMPT = [5, 6, 7, 5]
NO_GRAMMARS = GrammarError("the model has no tokenizer")
RULES = LogitRules(repetition_penalty=1.1)


def make_chunk(first_position: int, token_ids: list[int]) -> Chunk:
    return Chunk(
        index=0,
        seq_id=1,
        first_position=first_position,
        route_id=None,
        fragment_ids=(),
        samples=True,
        num_suppressed=0,
        score_target_ids=np.zeros(0, np.int32),
        input_ids=np.array(token_ids, np.int32),
        block_table=np.zeros(1, np.int32),
    )


def started(output: list[int], *, first: int = 0) -> KnownSequences:
    sequences = KnownSequences(NO_GRAMMARS)
    known = np.array([*PROMPT, *output][first:], np.int32)
    tokens = KnownTokens(len(PROMPT), first, known)
    sequences.start(SequenceStart(1, 0.0, 1.0, 0, rules=RULES, known=tokens))
    return sequences


def seen(sequences: KnownSequences, *chunks: Chunk) -> tuple[list[int], list[int]]:
    """Prompt ids and output before the token after the last chunk."""
    for chunk in chunks:
        sequences.note(chunk)
    past = sequences.row_sampling(chunks[-1]).past
    return past.prompt.tolist(), past.output.tolist()


def test_a_prompt_that_no_step_brings_is_known_from_the_start() -> None:
    assert seen(started([]), make_chunk(3, [5])) == ([5, 6, 7], [])


def test_generated_tokens_come_as_inputs_of_steps() -> None:
    chunks = [make_chunk(0, PROMPT), make_chunk(4, [9]), make_chunk(5, [8])]
    assert seen(started([]), *chunks) == ([5, 6, 7], [9, 8])


def test_a_step_that_is_issued_again_adds_nothing() -> None:
    chunks = [make_chunk(0, PROMPT), make_chunk(4, [9]), make_chunk(4, [9])]
    assert seen(started([]), *chunks) == ([5, 6, 7], [9])


def test_a_sequence_that_goes_on_after_a_preemption_knows_what_it_generated() -> None:
    sequences = started([9, 8, 7])
    assert seen(sequences, make_chunk(0, [*PROMPT, 9]), make_chunk(5, [8, 7])) == (
        [5, 6, 7],
        [9, 8, 7],
    )


def test_where_only_output_counts_no_prompt_is_known() -> None:
    assert seen(started([], first=4), make_chunk(3, [5]), make_chunk(4, [9])) == ([], [9])


def test_many_tokens_are_kept_in_order() -> None:
    sequences = started([])
    chunks = [make_chunk(4 + n, [n]) for n in range(500)]
    assert seen(sequences, make_chunk(0, PROMPT), *chunks)[1] == list(range(500))


def test_a_chunk_after_tokens_that_are_not_known_is_refused() -> None:
    with pytest.raises(StepRefusedError, match="position 6, its tokens are known up to 4"):
        started([]).note(make_chunk(6, [1]))


def test_a_sequence_that_ended_is_forgotten() -> None:
    sequences = started([])
    sequences.end([1, 2])
    assert 1 not in sequences
    sequences.note(make_chunk(50, [1]))


SLOW = "a{200000}"
"""Takes about half a second of CPU time."""


def grammar_start(seq_id: int, grammar: str, namespace: str = "") -> SequenceStart:
    known = KnownTokens(len(PROMPT), len(PROMPT), np.zeros(0, np.int32))
    rules = LogitRules(grammar=grammar_text("regex", grammar))
    return SequenceStart(seq_id, 0.0, 1.0, 0, rules=rules, known=known, namespace=namespace)


def test_grammars_are_compiled_beside_the_steps_and_waited_for_by_their_own_token() -> None:
    compiler = load_grammar_compiler(DEMO_MODEL_DIR, vocab_size=3072, eos_token_ids=(2, 0))
    sequences = KnownSequences(compiler)
    for seq_id, namespace in ((1, "one"), (2, "one"), (3, "two")):
        sequences.start(grammar_start(seq_id, SLOW, namespace))
    assert sequences.compiling() == [1, 2, 3]
    sequences.end([3])
    sampling = sequences.row_sampling(make_chunk(0, PROMPT))
    assert sampling.grammar_ids is not None
    assert sampling.grammar_ids.sum() == 1
    assert sequences.compiling() == []
    assert compiler.num_kept == 1
    sequences.start(grammar_start(4, SLOW, "one"))
    assert sequences.compiling() == []
    sequences.close()


def test_a_grammar_that_cannot_be_compiled_fails_with_its_own_token() -> None:
    compiler = load_grammar_compiler(DEMO_MODEL_DIR, vocab_size=3072, eos_token_ids=(2, 0))
    sequences = KnownSequences(compiler)
    sequences.start(grammar_start(1, "(["))
    assert sequences.failures([1]) == []
    assert sequences.row_sampling(make_chunk(0, PROMPT)).grammar_ids is None
    assert [failure.seq_id for failure in sequences.failures([1])] == [1]
    sequences.close()
