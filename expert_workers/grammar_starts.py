"""Grammars of sequences that begin, compiled beside the steps."""

from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from cluster.errors import GrammarError
from cluster.grammar import GrammarCompiler, GrammarState

_Key = tuple[str, str]
"""Namespace and grammar."""


class GrammarStarts:
    """Owner of the thread that compiles and of what it has under way. What is compiled is not shared between threads:
    the one that runs steps takes it when it is done.
    """

    def __init__(self, grammars: GrammarCompiler | GrammarError) -> None:
        """grammars: or why there are none on this rank."""
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._compiling: dict[_Key, Future[LLMatcher]] = {}

    def close(self) -> None:
        """Does not wait for what is being compiled."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, grammar: str, namespace: str) -> None:
        """Has it compiled, unless it is kept or under way. Those that wait come one after the other."""
        grammars, key = self._grammars, (namespace, grammar)
        if isinstance(grammars, GrammarError):
            return
        self._take_done(grammars)
        if key in self._compiling:
            return
        if grammars.kept(grammar, namespace) is None:
            self._compiling[key] = self._thread.submit(_ready, grammars, grammar)

    def drop(self, grammar: str, namespace: str) -> None:
        """No sequence waits for it any more."""
        compiling = self._compiling.get((namespace, grammar))
        if compiling is not None and compiling.cancel():
            del self._compiling[namespace, grammar]

    def _take_done(self, grammars: GrammarCompiler) -> None:
        """Those that nobody has started; what has failed fails again."""
        for key in [key for key, compiling in self._compiling.items() if compiling.done()]:
            compiling = self._compiling.pop(key)
            if compiling.exception() is None:
                namespace, grammar = key
                grammars.keep(grammar, namespace, compiling.result())

    def is_compiling(self, grammar: str, namespace: str) -> bool:
        compiling = self._compiling.get((namespace, grammar))
        return compiling is not None and not compiling.done()

    def start(self, grammar: str, namespace: str) -> GrammarState:
        """A new text; waits where it is still compiled. Raises GrammarError."""
        if isinstance(self._grammars, GrammarError):
            raise GrammarError(str(self._grammars))
        compiling = self._compiling.pop((namespace, grammar), None)
        if compiling is None:
            return self._grammars.start(grammar, namespace)
        return self._grammars.keep(grammar, namespace, compiling.result())


def _ready(grammars: GrammarCompiler, grammar: str) -> LLMatcher:
    """With what its first mask adds, which may take longer than the rest. Raises GrammarError."""
    matcher = grammars.compiled(grammar)
    matcher.deep_copy().compute_bitmask()
    return matcher
