"""The Ray actor `HttpServer`: tokenises, validates, streams. Knows the engine by its endpoint only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from cluster.channel_keys import PeerKeys
from cluster.config import Config
from cluster.log import configure_logging
from deploy.cell_plan import CellPlan
from deploy.pulse import HANG_SECONDS
from router_service.api_keys import HttpKeys
from router_service.http_protocol import ConnectionLimits
from router_service.http_server import BoundPorts, HttpServerOptions
from router_service.http_server import HttpServer as HttpService
from router_service.model_parsers import ParserNames
from router_service.tls_files import tls_files
from router_service.tracing import otlp_provider

UPDATE_WAITS = 4
"""An update of the weights waits for the end of a step, for the directory, for all ranks to read and for all to take,
each at most as long as a start may."""


@dataclass(frozen=True)
class StartedHttpServer:
    """Where a server listens and which process it is."""

    ports: BoundPorts
    pid: int


class HttpServer:
    """`run` occupies one thread of the actor until `stop`."""

    def __init__(
        self,
        config: Config,
        plan: CellPlan,
        engine_endpoint: str,
        engine_keys: PeerKeys,
        http_keys: HttpKeys,
        *,
        trace_environment: Mapping[str, str] | None = None,
    ) -> None:
        """trace_environment: what OpenTelemetry reads from the environment; None: no traces."""
        configure_logging()
        os.environ.update(trace_environment or {})  # this process may be on another host
        self._service = HttpService(
            HttpServerOptions(
                model_dir=plan.model_dir,
                served_model_name=plan.served_model_name,
                created=plan.created,
                max_model_len=plan.max_model_len,
                vocab_size=plan.spec.vocab_size,
                eos_token_ids=plan.spec.eos_token_ids,
                engine_endpoint=engine_endpoint,
                engine_keys=engine_keys,
                host=config.http.host,
                port=config.http.port,
                admin_host=config.http.admin_host,
                admin_port=config.http.admin_port,
                max_body_bytes=config.http.max_body_bytes,
                max_bodies_bytes=config.http.max_bodies_bytes,
                version=version("pointsman"),
                api_keys=http_keys.api,
                admin_keys=http_keys.admin,
                shares_ports=config.http.servers > 1,
                outage_seconds=config.cell.recovery_limit_seconds,
                weight_update_seconds=UPDATE_WAITS * config.cell.start_timeout_seconds,
                parser_names=ParserNames(
                    config.http.tool_call_parser, config.http.reasoning_parser
                ),
                limits=ConnectionLimits(write_seconds=config.http.write_timeout_seconds),
                cors_origins=config.http.cors_origins,
                logs_access=config.http.access_log,
                tracer_provider=None
                if trace_environment is None
                else partial(otlp_provider, version("pointsman")),
                tls=tls_files(config.http.tls_cert, config.http.tls_key),
            )
        )

    def start(self, ports: BoundPorts) -> StartedHttpServer:
        """On these ports, where 0 is any free one."""
        return StartedHttpServer(self._service.start(ports), os.getpid())

    def run(self) -> None:
        self._service.wait()

    def pulse(self) -> bool:
        """That the process lives and its event loop takes turns; late where it does not."""
        return self._service.takes_turns(2 * HANG_SECONDS)

    def drain(self, seconds: float) -> bool:
        return self._service.drain(seconds)

    def stop(self, seconds: float, reason: str) -> None:
        self._service.stop(seconds, reason)
