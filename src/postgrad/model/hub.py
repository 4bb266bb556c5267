"""The model hub: whether it can be reached."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

HUB_TIMEOUT_S = 3


def hub_is_reachable() -> bool:
    """Return whether the model hub, or the proxy to it, accepts a connection."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    address = urlsplit(ENDPOINT)
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy)
    if not address.hostname:
        return True  # a proxy in an unknown format: let the download try
    default_port = 80 if address.scheme == "http" else 443
    try:
        connection = socket.create_connection(
            (address.hostname, address.port or default_port), timeout=HUB_TIMEOUT_S
        )
    except OSError:
        return False
    connection.close()
    return True
