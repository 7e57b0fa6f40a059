"""uvicorn's HTTP/1.1 with JSON also for what never becomes a request, and with bounds on how a request arrives."""

from asyncio import TimerHandle, Transport
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.errors import RequestError
from cluster.log import logger
from router_service.openai_errors import HeadTooLargeError, SlowRequestError, error_response
from router_service.visits import request_id_of

MAX_HEAD_BYTES = 64 * 2**10
"""Of the request line with all headers."""
MIN_BODY_BYTES_PER_SECOND = 16 * 2**10
"""Averaged over `receive_seconds`; a body that comes slower is given up (idea: Apache's RequestReadTimeout)."""
MAX_DROPPED_BYTES = 64 * 2**20
"""Of what a client still sends after the answer that closes its connection."""
_log = logger("http")


@dataclass(frozen=True)
class ConnectionLimits:
    receive_seconds: float = 30.0
    """A head must be complete after so long, a body too or at least flow."""
    write_seconds: float = 60.0
    """A client that has not read for so long what is written for it (64 KiB wait in memory, and what the system takes)
    is given up, and what it asked for with it. Reading some of it does not help: a quarter may remain."""
    drop_seconds: float = 10.0
    """For so long what a client still sends after its last answer is read and dropped."""


class _LastAnswer:
    """The transport as one answer sees it, whose end may close the connection."""

    def __init__(self, transport: Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class JsonErrorProtocol(HttpToolsProtocol):
    """One parser everywhere (httptools), whatever else is installed. Owner of the deadline of the message that is
    arriving, from the connection or the message's first byte to its last; afterwards uvicorn's own apply."""

    limits = ConnectionLimits()

    _unread: TimerHandle | None = None
    """Ends a connection whose client does not read."""
    _deadline: TimerHandle | None = None
    _head_complete = False
    """Of the message that is arriving."""
    _num_received = 0
    """Bytes since the message began."""
    _num_in_piece = 0
    """Bytes of what arrived last, as far as they may be of the next message."""
    _num_judged = 0
    """Of those, at the last look."""
    _fault: RequestError | None = None
    """Of the head that the parser is told to give up."""
    _refusal: RequestError | None = None
    """What is said when all requests before it are answered."""
    _drop_end: TimerHandle | None = None
    """Set while what still comes is dropped."""
    _num_dropped = 0
    _is_lost = False
    """Nobody is waited for any more, so that nothing keeps what is left of the connection."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn goes on waiting for the next request where the connection was reset."""
        self._is_lost = True
        self._unset_keepalive_if_required()
        self._unwatch()
        self._stop_waiting_for_reader()
        if self._drop_end is not None:
            self._drop_end.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._drop_end is not None:
            self._drop(len(data))
        if self._is_over:
            return
        self._num_received += len(data)
        self._num_in_piece = len(data)
        super().data_received(data)
        if self._is_over:
            return
        if self._is_unwatched:
            self._watch()
        is_head = self._deadline is not None and not self._head_complete
        if is_head and self._num_received > MAX_HEAD_BYTES:
            self._refuse_in_turn(_head_too_large())

    @property
    def _is_over(self) -> bool:
        """Nothing that comes is looked at any more."""
        return self._drop_end is not None or self._refusal is not None

    @property
    def _is_unwatched(self) -> bool:
        """A line break before a request ends uvicorn's wait for the next one and begins none."""
        waits = self.timeout_keep_alive_task is not None
        return not waits and (self.cycle is None or self.cycle.response_complete)

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._head_complete = False
        self._num_received, self._num_judged = self._num_in_piece, 0
        self._watch()

    def on_headers_complete(self) -> None:
        """What it raises ends the parser, which then calls send_400_response."""
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._fault = _head_too_large()
        elif num_hosts != 1 and (num_hosts or self.parser.get_http_version() == "1.1"):
            self._fault = RequestError(
                f"the request has {num_hosts} Host headers; HTTP/1.1 needs one"
            )
        if self._fault is not None:
            raise self._fault
        super().on_headers_complete()
        self.cycle.transport = _LastAnswer(self.transport, self._close)  # type: ignore[assignment]
        self._head_complete = True

    def on_message_complete(self) -> None:
        self._unwatch()
        self._head_complete = False
        self._num_received = self._num_in_piece = 0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._keep_alive()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it once and expects the transport to be closed."""
        malformed = RequestError(f"{msg} Send HTTP/1.1 with well-formed headers.")
        self._refuse_in_turn(self._fault or malformed)

    def _watch(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.receive_seconds, self._judge)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _judge(self) -> None:
        """The message has had `receive_seconds` since the last look."""
        self._deadline = None
        num_new, self._num_judged = self._num_received - self._num_judged, self._num_received
        least = MIN_BODY_BYTES_PER_SECOND * self.limits.receive_seconds
        flows = self._head_complete and num_new >= least
        if flows or self.flow.read_paused or self._owes_an_answer:
            self._watch()
            return
        self._refuse(
            SlowRequestError(
                f"the request did not arrive: its headers have {self.limits.receive_seconds:g} s, its body "
                f"must come at {MIN_BODY_BYTES_PER_SECOND} bytes per second"
            )
        )

    @property
    def _owes_an_answer(self) -> bool:
        """To a request that has arrived, while a part of the next one is there already."""
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)

    @property
    def _is_answered(self) -> bool:
        if self.cycle is None or not self.cycle.response_started:
            return False
        return self._head_complete or not self.cycle.response_complete

    def _refuse_in_turn(self, error: RequestError) -> None:
        """After the answers to all requests before this one."""
        is_queued = bool(self.pipeline) and self.pipeline[0][0] is self.cycle
        if is_queued and self.cycle.more_body:
            self.pipeline.popleft()
        elif not self._owes_an_answer:
            self._refuse(error)
            return
        self._unwatch()
        self._head_complete = False
        self._refusal = error

    def _refuse(self, error: RequestError) -> None:
        """Closes the connection, with the answer unless this message has one or another one is being sent."""
        self._unwatch()
        self._wait_for_reader()
        if not self._is_answered:
            answer = error_response(error)
            answer.headers["connection"] = "close"
            answer.headers["x-request-id"] = request_id_of(self.headers or ())
            _log.info(
                "request refused status=%d error=%s request_id=%s",
                answer.status_code,
                type(error).__name__,
                answer.headers["x-request-id"],
            )
            head = [
                STATUS_LINE[answer.status_code],
                *map(b"%b: %b\r\n".__mod__, answer.raw_headers),
            ]
            self.transport.write(b"".join([*head, b"\r\n", bytes(answer.body)]))
        is_cut = self._is_answered and not self.cycle.response_complete
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if is_cut:
            self.transport.close()
        else:
            self._end_sending()

    # --- clients that still send

    def _close(self) -> None:
        """After an answer that is the connection's last one."""
        if self.cycle.more_body:
            self._end_sending()
        else:
            self.transport.close()

    def _end_sending(self) -> None:
        """Closing with bytes unread would reset the connection, and who is still sending would never see the answer
        (RFC 9112, 9.6)."""
        if self.transport.is_closing():
            return
        self._unwatch()
        self._drop_end = self.loop.call_later(self.limits.drop_seconds, self.transport.close)
        self._wait_for_reader()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_DROPPED_BYTES:
            self.transport.close()

    # --- clients that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_waiting_for_reader()

    def _keep_alive(self) -> None:
        """uvicorn waits for the next request from the answer on, which may be there before the end of its request."""
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    # closing waits until all has been read

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._wait_for_reader()

    def on_response_complete(self) -> None:
        if self._drop_end is not None:
            self.server_state.total_requests += 1
            return
        is_last = not self.pipeline
        super().on_response_complete()
        if self._refusal is not None and is_last and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._refuse(self._refusal)
        if self.transport.is_closing():
            self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        if self._unread is None and not self._is_lost:
            self._unread = self.loop.call_later(self.limits.write_seconds, self._give_up_reader)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up_reader(self) -> None:
        """The connection is lost at once, so whoever answers learns that its client has left."""
        self._unread = None
        _log.info("client does not read seconds=%g", self.limits.write_seconds)
        self.transport.abort()


def _head_too_large() -> HeadTooLargeError:
    return HeadTooLargeError(f"the headers are over the limit of {MAX_HEAD_BYTES} bytes")


def protocol_with(limits: ConnectionLimits) -> type[JsonErrorProtocol]:
    """uvicorn makes the instances, so the limits are the class's."""
    return type("Protocol", (JsonErrorProtocol,), {"limits": limits})
