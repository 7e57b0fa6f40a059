"""The prompt at the start of every choice of it, for `echo`: text, and, with log-probs, tokens and their scores."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.messages import OutputDelta
from cluster.scores import ScoreColumns
from router_service.beside_the_loop import beside_the_loop
from router_service.choice_delta import ChoiceDelta
from router_service.logprobs import ScoredToken, scored_token
from router_service.tokenizer import TextCodec


class PromptEcho:
    """Of one prompt. Owner of what its choices wait for: the scores of the prompt, if they were asked."""

    def __init__(
        self,
        token_ids: Sequence[int],
        codec: TextCodec,
        num_logprobs: int | None,
        sent: str | None = None,
    ) -> None:
        """num_logprobs: alternatives listed with each token; None: no log-probs, so nothing to wait for.
        sent: the text that the prompt was sent as, if it was one."""
        self._token_ids = token_ids
        self._num_logprobs = num_logprobs
        self._placed = _decoded(token_ids, codec) if sent is None else _sent(token_ids, codec, sent)
        self.text = self._placed.text
        self.held = self._placed.held
        self.scored: list[ScoredToken] = []
        self.is_ready = num_logprobs is None

    def add_scores(self, scores: ScoreColumns) -> None:
        """scores: [prompt - 1] of the tokens from the second on."""
        first = ScoredToken(self._token_ids[0], 0, None, ())
        offsets = self._placed.offsets
        places = zip(self._token_ids[1:], offsets[1:], scores.split(), strict=True)
        rest = [scored_token(*place, self._num_logprobs or 0) for place in places]
        self.scored = [first, *rest]
        self.is_ready = True

    def shifted(self, tokens: Sequence[ScoredToken]) -> list[ScoredToken]:
        """Tokens of a completion with their places in the text that begins with the prompt."""
        return [replace(token, text_offset=token.text_offset + len(self.text)) for token in tokens]


class Echoing:
    """Puts the prompt before what a choice says. Owner of what choices have said before their prompt was scored."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        codec: TextCodec,
        num_choices: int,
        num_logprobs: int | None,
        sent: Sequence[str | None],
    ) -> None:
        """num_choices: of each prompt; num_logprobs, sent: see PromptEcho."""
        self._num_choices = num_choices
        self._echoes = [
            PromptEcho(ids, codec, num_logprobs, text)
            for ids, text in zip(prompts, sent, strict=True)
        ]
        self._held: dict[int, list[ChoiceDelta]] = defaultdict(list)
        self._begun: set[int] = set()

    def held(self, index: int) -> bytes:
        """What choice `index` goes on from: the beginning of a character at the end of its prompt."""
        return self._echoes[index // self._num_choices].held

    async def add(
        self, index: int, delta: OutputDelta, taken: list[ChoiceDelta]
    ) -> list[ChoiceDelta]:
        """taken: what the choice says with this delta. Returns what can be told now, of all choices of the prompt."""
        prompt = index // self._num_choices
        echo = self._echoes[prompt]
        self._held[index] += taken
        scores = delta.prompt_scores
        if scores is not None:
            size = scores.num_tokens + scores.top_ids.size
            await beside_the_loop(size, lambda: echo.add_scores(scores))
        if not echo.is_ready:
            return []
        first = prompt * self._num_choices
        siblings = range(first, first + self._num_choices)
        return [told for sibling in siblings for told in self._tell(sibling, echo)]

    def _tell(self, index: int, echo: PromptEcho) -> list[ChoiceDelta]:
        held = self._held.pop(index, [])
        told = [replace(delta, scored=echo.shifted(delta.scored)) for delta in held]
        if told and index not in self._begun:
            self._begun.add(index)
            text, scored = echo.text + told[0].text, echo.scored + told[0].scored
            told[0] = replace(told[0], text=text, scored=scored)
        return told


@dataclass(frozen=True)
class _Placed:
    """A prompt as text. offsets: how many characters of it come before each token; held: see Detokenizer."""

    text: str
    offsets: list[int]
    held: bytes = b""


def _decoded(token_ids: Sequence[int], codec: TextCodec) -> _Placed:
    """Special tokens as they are written. A character that is not complete is left to the completion."""
    detokenizer = codec.detokenizer(codec.special_texts)
    pieces, offsets, length = [], [], 0
    for token_id in token_ids:
        offsets.append(length + detokenizer.num_broken_by(token_id))
        pieces.append(detokenizer.add(token_id))
        length += len(pieces[-1])
    return _Placed("".join(pieces), offsets, detokenizer.held)


def _sent(token_ids: Sequence[int], codec: TextCodec, text: str) -> _Placed:
    """The tokens placed in the text that they were made of: a tokenizer may put some before it (they have no
    characters there), or write it otherwise (Unicode's composed forms)."""
    decoded = _decoded(token_ids, codec)
    if decoded.text.endswith(text):
        before = len(decoded.text) - len(text)
        return _Placed(text, [max(0, offset - before) for offset in decoded.offsets])
    return _Placed(text, codec.starts(text))
