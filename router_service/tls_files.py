"""Certificate and key that a port is served with. Looked at before anything starts."""

import ssl
from dataclasses import dataclass

from cluster.errors import ConfigError


@dataclass(frozen=True)
class TlsFiles:
    """PEM: the certificate with its chain, and its private key without a passphrase."""

    cert: str
    key: str


def tls_files(cert: str, key: str) -> TlsFiles | None:
    """None without both. Raises ConfigError when one is missing, cannot be read, or they do not fit together."""
    if not cert and not key:
        return None
    if not cert or not key:
        given, missing = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} {cert or key}: {missing} is missing; TLS needs both")
    for flag, file in (("--tls-cert", cert), ("--tls-key", key)):
        _check_readable(flag, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").replace("_", " ").lower()
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key}: not a PEM certificate and its private key "
            f"without a passphrase: {reason}"
        ) from error
    return TlsFiles(cert, key)


def _no_passphrase() -> str:
    """Without it OpenSSL would ask at the terminal."""
    return ""


def _check_readable(flag: str, file: str) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from error
