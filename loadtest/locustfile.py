"""Two kinds of locust users over an OpenAI-compatible endpoint with streaming, in equal numbers.

    locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 \\
        --users 8 --spawn-rate 8 --run-time 1m --stop-timeout 60 [ChatUser | SharedPrefixUser]

`ChatUser` holds conversations of several turns, each with the history of those before it; `SharedPrefixUser` asks
with one of a few long system prompts (token ids) and a short tail of its own. Neither pauses between requests. Each
request is an event of type `full`; `ttft` and `itl` are the time to the first piece of text and the time between
pieces, of requests that did not fail. An error inside a stream, an early end or a missing usage is a failure; locust
then exits with 1.

A Markdown table of latencies and of computed, cached and replayed tokens ends the output. Beside locust's arguments:

    --model NAME            its name in the API (default: the first one that the server has)
    --context-tokens N      no request is longer (default: what the server says, else 2048)
    --api-key-file FILE     first line: the bearer token
    --workload-seed N       same seed, same workload (0)
    --report-file FILE      where the results go as JSON
    --chat-turns N          questions of a conversation (6)
    --chat-max-tokens N     of each answer (48)
    --num-prefixes N        long system prompts (4)
    --prefix-tokens N       of each of them (1024)
    --max-tail-tokens N     8 to N tokens of its own follow the prefix (32)
    --zipf-exponent X       prefix i is asked for in proportion to 1 / i ** X (1.0)
    --shared-max-tokens N   of each answer after a shared prefix (16)
    --vocab-size N          token ids are drawn below it (3000)

`--stop-timeout` lets requests that run at the end finish; without it they are cut off and counted nowhere.
"""

from locust import events, task
from locust.argument_parser import LocustArgumentParser

from loadtest.streaming_user import StreamingUser
from loadtest.workload import (
    ChatShape,
    Conversation,
    SharedPrefixShape,
    conversation,
    shared_prefix_request,
)


@events.init_command_line_parser.add_listener
def _add_arguments(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("load: chats and shared prefixes")
    for name, default, text in (
        ("--chat-turns", 6, "questions of a conversation"),
        ("--chat-max-tokens", 48, "of each answer"),
        ("--num-prefixes", 4, "long system prompts"),
        ("--prefix-tokens", 1024, "of each of them"),
        ("--max-tail-tokens", 32, "8 to N tokens of its own follow the prefix"),
        ("--shared-max-tokens", 16, "of each answer after a shared prefix"),
        ("--vocab-size", 3000, "token ids are drawn below it"),
    ):
        group.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        *("--zipf-exponent",),
        type=float,
        default=1.0,
        metavar="X",
        help="prefix i is asked for in proportion to 1 / i ** X (default: 1.0)",
    )


class ChatUser(StreamingUser):
    """Owner of the turn that it asks next."""

    def on_start(self) -> None:
        options = self.load.options
        self._shape = ChatShape(
            options.chat_turns, options.chat_max_tokens, self.load.context_tokens
        )
        self._turn = self._first_turn()

    def _first_turn(self) -> Conversation:
        return conversation(self._shape, self.load.options.workload_seed, next(self.load.numbers))

    @task
    def ask_one_question(self) -> None:
        messages = [{"role": m.role, "content": m.content} for m in self._turn.messages]
        answer = self.ask(
            "chat",
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": self._shape.max_tokens},
        )
        following = None if answer is None else self._turn.after(answer.text)
        self._turn = following or self._first_turn()


class SharedPrefixUser(StreamingUser):
    def on_start(self) -> None:
        options = self.load.options
        self._shape = SharedPrefixShape(
            num_prefixes=options.num_prefixes,
            prefix_tokens=options.prefix_tokens,
            max_tail_tokens=options.max_tail_tokens,
            max_tokens=options.shared_max_tokens,
            zipf_exponent=options.zipf_exponent,
            vocab_size=options.vocab_size,
            context_tokens=self.load.context_tokens,
        )

    @task
    def ask_with_a_tail(self) -> None:
        seed, number = self.load.options.workload_seed, next(self.load.numbers)
        self.complete("shared prefix", shared_prefix_request(self._shape, seed, number))
