"""Whether a port can be had, so that a second stack on a machine does not fail but moves aside."""

import socket


def free(host: str, port: int) -> bool:
    """Whether something can listen on `host`:`port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def wanted_or_any(host: str, port: int) -> int:
    """`port` when it is free, else 0: any."""
    return port if port and free(host, port) else 0
