"""What a server opens to others: what is refused, and what is allowed and told (docs/security.md says why)."""

import socket
from ipaddress import ip_address

from cluster.config import HttpSection
from cluster.errors import ConfigError
from router_service.api_keys import HttpKeys


def check_exposure(http: HttpSection, keys: HttpKeys) -> None:
    """Raises ConfigError."""
    if keys.admin is None and not is_loopback(http.admin_host):
        raise ConfigError(
            f"--admin-host {http.admin_host}: whoever reaches it could evict, exchange the weights "
            "and switch features; give --admin-key-file, or leave the admin port on loopback"
        )


def exposures(http: HttpSection, keys: HttpKeys) -> list[str]:
    """One line each."""
    lines = []
    if keys.api is None and not is_loopback(http.host):
        lines.append(f"--host {http.host}: whoever reaches it may ask; --api-key-file says who may")
    if keys.api is None and "*" in http.cors_origins:
        lines.append(
            "--cors-origin *: any web page in a browser that reaches this server may ask it; "
            "--api-key-file says who may"
        )
    with_keys = {
        ("--host", http.host): keys.api is not None,
        ("--admin-host", http.admin_host): keys.admin is not None,
    }
    lines += [
        f"{flag} {host}: keys and answers cross the network unencrypted; --tls-cert encrypts them"
        for (flag, host), has_keys in with_keys.items()
        if has_keys and not http.tls_cert and not is_loopback(host)
    ]
    return lines


def is_loopback(host: str) -> bool:
    """A name that cannot be resolved is none: whoever listens on it says so."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ip_address(address.partition("%")[0]).is_loopback for address in addresses)
