"""What the logits of a request go through before a token is drawn. Declared once, for engine and workers."""

import msgspec


class LogitRules(msgspec.Struct, frozen=True):
    """Of every output token of one request, in this order. "Seen": in the prompt or generated before the token.

    Ids are in range and distinct; numbers are finite. The rules may leave no id only by `bad_words` of several ids.
    """

    grammar: str | None = None
    """As `cluster.grammar.grammar_text` makes it: only ids are sampled that keep the output within it. There are no
    `allowed_token_ids` and no `bad_words` then."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is sampled; None: any."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of ids, none empty, whose last one is not sampled where the ones before it have just been generated."""
    biased_token_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    """Added to the logits of `biased_token_ids`."""
    repetition_penalty: float = 1.0
    """Above 0. Logits of ids that were seen: divided by it where positive, else multiplied."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a generated id as often as it was generated."""
    presence_penalty: float = 0.0
    """Taken off the logit of a generated id once."""

    @property
    def reads_prompt(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def reads_output(self) -> bool:
        """The token depends on those that were generated before it."""
        return bool(
            self.reads_prompt
            or self.frequency_penalty
            or self.presence_penalty
            or self.bad_words
            or self.grammar is not None
        )


NO_RULES = LogitRules()
