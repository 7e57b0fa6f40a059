"""What a rank knows of the sequences that it samples for: their parameters and, where rules look back, their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.errors import GrammarError
from cluster.grammar import GrammarCompiler, GrammarState
from cluster.worker_messages import KnownTokens, SequenceFailure, SequenceStart
from expert_workers.grammar_starts import GrammarStarts
from expert_workers.inputs_from_step import Chunk, Int32Array, StepRefusedError
from expert_workers.logit_rules import NO_PAST, PastTokens
from expert_workers.sampler import BoolArray, RowSampling


@dataclass
class _Known:
    start: SequenceStart
    history: "TokenHistory | None" = None
    grammar: GrammarState | None = None
    failure: str | None = None
    """Why it cannot go on."""

    @property
    def awaited(self) -> tuple[str, str] | None:
        """Grammar and namespace that it has not begun with."""
        grammar = self.start.rules.grammar
        if grammar is None or self.grammar is not None or self.failure is not None:
            return None
        return grammar, self.start.namespace


class KnownSequences:
    """Owner of all that was told of them. Tokens are kept by position, so a step that is issued again adds nothing."""

    def __init__(self, grammars: GrammarCompiler | GrammarError) -> None:
        """grammars: or why there are none on this rank."""
        self._grammars = GrammarStarts(grammars)
        self._known: dict[int, _Known] = {}

    def close(self) -> None:
        self._grammars.close()

    def start(self, start: SequenceStart) -> None:
        known = _Known(start)
        if start.known is not None:
            known.history = TokenHistory(start.known)
        if start.rules.grammar is not None:
            self._grammars.begin(start.rules.grammar, start.namespace)
        self._known[start.seq_id] = known

    def end(self, seq_ids: Sequence[int]) -> None:
        """Forgets them; unknown ones are none of this rank's."""
        for seq_id in seq_ids:
            known = self._known.pop(seq_id, None)
            if known is not None and known.awaited is not None:
                self._drop(*known.awaited)

    def end_all(self) -> None:
        self.end(list(self._known))

    def _drop(self, grammar: str, namespace: str) -> None:
        if all(known.awaited != (grammar, namespace) for known in self._known.values()):
            self._grammars.drop(grammar, namespace)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._known

    def num_top_logprobs(self, seq_id: int) -> int:
        return self._known[seq_id].start.num_top_logprobs

    def failures(self, seq_ids: Sequence[int]) -> list[SequenceFailure]:
        """Of those that have no next token, whatever `row_sampling` said."""
        reasons = [(seq_id, self._known[seq_id].failure) for seq_id in seq_ids]
        return [SequenceFailure(seq_id, why) for seq_id, why in reasons if why is not None]

    def note(self, chunk: Chunk) -> None:
        """The chunk's tokens are known from now on. Raises StepRefusedError where some before them are not."""
        known = self._known.get(chunk.seq_id)
        if known is not None and known.history is not None:
            known.history.note(chunk)

    def row_sampling(self, chunk: Chunk) -> RowSampling:
        """Of the token after the chunk, which `note` has had."""
        known = self._known[chunk.seq_id]
        start, history = known.start, known.history
        past = NO_PAST if history is None else history.before(chunk.end_position)
        grammar_ids = self._grammar_ids(known, past)
        barred = start.barred_token_ids if chunk.end_position < start.barred_before else ()
        return RowSampling(
            temperature=start.temperature,
            top_p=start.top_p,
            seed=start.seed,
            choice=start.choice,
            position=chunk.end_position,
            top_k=start.top_k,
            min_p=start.min_p,
            barred_token_ids=barred if _leave_some(barred, grammar_ids) else (),
            rules=start.rules,
            past=past,
            grammar_ids=grammar_ids,
        )

    def compiling(self) -> list[int]:
        """Sequences whose next token would have to wait for their grammar."""
        awaited = [(seq_id, known.awaited) for seq_id, known in self._known.items()]
        return [s for s, what in awaited if what is not None and self._grammars.is_compiling(*what)]

    def _grammar_ids(self, known: _Known, past: PastTokens) -> BoolArray | None:
        """None without a grammar, and where it has failed."""
        grammar = known.start.rules.grammar
        if grammar is None or known.failure is not None:
            return None
        try:
            if known.grammar is None:
                known.grammar = self._grammars.start(grammar, known.start.namespace)
            return known.grammar.allowed_after(past.output)
        except GrammarError as error:
            known.failure = _reason(error)
            return None


def _leave_some(barred: tuple[int, ...], grammar_ids: BoolArray | None) -> bool:
    """Where a grammar lets nothing else come, its end comes though it is barred."""
    if grammar_ids is None or not barred:
        return True
    left = grammar_ids.copy()
    left[list(barred)] = False
    return bool(left.any())


def _reason(error: GrammarError) -> str:
    return f"structured output cannot go on: {error}"


class TokenHistory:
    """One sequence's tokens from some position on, as far as they are known."""

    def __init__(self, known: KnownTokens) -> None:
        self._first = known.first_position
        self._prompt = np.unique(known.token_ids[: known.num_prompt_tokens - self._first])
        self._num_prompt_tokens = known.num_prompt_tokens
        output = known.token_ids[known.num_prompt_tokens - self._first :]
        self._output = np.empty(max(64, 2 * len(output)), np.int32)
        self._output[: len(output)] = output
        self._num_output = len(output)

    def note(self, chunk: Chunk) -> None:
        end = self._num_prompt_tokens + self._num_output
        if chunk.first_position > end:
            raise StepRefusedError(
                f"seq {chunk.seq_id}: a chunk starts at position {chunk.first_position}, "
                f"its tokens are known up to {end}"
            )
        self._append(chunk.input_ids[end - chunk.first_position :])

    def before(self, position: int) -> PastTokens:
        """Valid until the next `note`."""
        return PastTokens(self._prompt, self._output[: position - self._num_prompt_tokens])

    def _append(self, token_ids: Int32Array) -> None:
        end = self._num_output + len(token_ids)
        if end > len(self._output):
            self._output = np.resize(self._output, 2 * end)
        self._output[self._num_output : end] = token_ids
        self._num_output = end
