"""An httpx client for a server on this host's loopback."""

import ssl

import httpx

# Plain HTTP needs none. Reading the bundle of authorities took each client some 40 ms of CPU, beside the engine.
_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def loopback_client(base_url: str, timeout_seconds: float) -> httpx.Client:
    """A client for `base_url`, which is on loopback. A proxy that the environment names would look on its own host."""
    return httpx.Client(base_url=base_url, timeout=timeout_seconds, trust_env=False, verify=_NO_AUTHORITIES)
