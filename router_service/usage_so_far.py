"""The counts of a stream while it runs, for `continuous_usage_stats` (vLLM's field; benchmarks time tokens by it)."""

from router_service.choice_delta import ChoiceDelta


class UsageSoFar:
    """Owner of how many tokens of each choice have been told. Ends at what the usage chunk says."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_told: dict[int, int] = {}

    def take(self, delta: ChoiceDelta) -> None:
        """Tokens whose text is held back (half a character, the start of a stop string) count when it is told."""
        told = self._num_told.get(delta.index, 0) + len(delta.token_ids)
        self._num_told[delta.index] = told if delta.end is None else delta.end.completion_tokens

    def counts(self) -> dict[str, int]:
        """As in `usage`. Where the prompt came from is known at the end only."""
        completion_tokens = sum(self._num_told.values())
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._num_prompt_tokens + completion_tokens,
        }
