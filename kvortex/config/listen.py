"""Whether the server's port is free, before minutes of loading."""

from __future__ import annotations

import errno
import socket

from kvortex.errors import UsageError


def check_port_is_free(host: str | None, port: int) -> None:
    """Binds as vLLM will and lets go again; a port in TIME_WAIT is free.

    Args:
        host: None is vLLM's default, all of this machine's IPv4 addresses. Then a listener on IPv6's is
            refused too: `localhost` would reach that one.

    Raises:
        UsageError: the port is taken (naming its owner where that can be seen), or cannot be bound.
    """
    addresses = [host] if host else ["", "::"]
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if address == "::" and host is None and error.errno != errno.EADDRINUSE:
                continue  # a machine without IPv6
            raise _refusal(host, port, error) from None


def _refusal(host: str | None, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        owner = _owner(port)
        by = f" by process {owner[0]} ({owner[1]})" if owner is not None else ""
        return UsageError(f"port {port} is taken{by}", hint="give another --port, or end that process")
    if error.errno == errno.EACCES:
        return UsageError(f"port {port} needs privileges this process lacks", hint="give a --port of 1024 or more")
    where = f"{host}:{port}" if host else f"port {port}"
    return UsageError(f"{where} cannot be listened on: {error.strerror or error}", hint="give another --host or --port")


def _owner(port: int) -> tuple[int, str] | None:
    """Process id and name of who listens; None where this user may not see it."""
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address and address[1] == port and connection.pid:
                name = psutil.Process(connection.pid).name()
                return connection.pid, name
    except (psutil.Error, OSError):
        return None
    return None
