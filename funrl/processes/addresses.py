"""Names of hosts in HTTP headers, for the servers that answer this machine alone."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True for a name or an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The host in a Host header, without its port."""
    return header.rpartition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]
