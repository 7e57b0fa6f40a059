"""What a rank knows of the sequences that it samples for: their parameters and, where rules look back, their tokens."""

from collections.abc import Sequence

import numpy as np

from cluster.worker_messages import KnownTokens, SequenceStart
from expert_workers.inputs_from_step import Chunk, Int32Array, StepRefusedError
from expert_workers.logit_rules import NO_PAST, PastTokens
from expert_workers.sampler import RowSampling


class KnownSequences:
    """Owner of all that was told of them. Tokens are kept by position, so a step that is issued again adds nothing."""

    def __init__(self) -> None:
        self._starts: dict[int, SequenceStart] = {}
        self._histories: dict[int, TokenHistory] = {}

    def start(self, start: SequenceStart) -> None:
        self._starts[start.seq_id] = start
        if start.known is not None:
            self._histories[start.seq_id] = TokenHistory(start.known)

    def end(self, seq_ids: Sequence[int]) -> None:
        """Forgets them; unknown ones are none of this rank's."""
        for seq_id in seq_ids:
            self._starts.pop(seq_id, None)
            self._histories.pop(seq_id, None)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._starts

    def num_top_logprobs(self, seq_id: int) -> int:
        return self._starts[seq_id].num_top_logprobs

    def note(self, chunk: Chunk) -> None:
        """The chunk's tokens are known from now on. Raises StepRefusedError where some before them are not."""
        history = self._histories.get(chunk.seq_id)
        if history is not None:
            history.note(chunk)

    def row_sampling(self, chunk: Chunk) -> RowSampling:
        """Of the token after the chunk, which `note` has had."""
        start = self._starts[chunk.seq_id]
        history = self._histories.get(chunk.seq_id)
        is_barred = chunk.end_position < start.barred_before
        return RowSampling(
            temperature=start.temperature,
            top_p=start.top_p,
            seed=start.seed,
            choice=start.choice,
            position=chunk.end_position,
            top_k=start.top_k,
            min_p=start.min_p,
            barred_token_ids=start.barred_token_ids if is_barred else (),
            rules=start.rules,
            past=NO_PAST if history is None else history.before(chunk.end_position),
        )


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
