"""One HTTP exchange with a server, and what its failure means."""

import email.utils
import os
import time
from contextlib import suppress
from typing import Any

import httpx2

from paceline.decode.remote_dialects import Failed, Garbled, Rejected


class Refused(Failed):
    """A server that takes no requests at present, whatever they are."""


class Denied(Exception):
    """A server that wants another key."""


async def exchange(client: httpx2.AsyncClient, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a JSON object, or ask for one, and return the one that comes back.

    Raises:
        Rejected: the request is refused for what it is.
        Refused: there is no connection, or the server has no room (429, 503).
        Failed: no whole answer came; Garbled if it is not a JSON object.
        Denied: the key is wrong or missing.
    """
    response = await _answered(client, url, body)
    try:
        data = response.json()
    except ValueError:
        raise Garbled(f"an answer that is not JSON ({_quoted(response, client)})") from None
    if not isinstance(data, dict):
        raise Garbled(f"an answer that is no JSON object ({_quoted(response, client)})")
    return data


async def fetch_text(client: httpx2.AsyncClient, url: str) -> str:
    """Return the page at an address.

    Raises:
        Rejected, Refused, Failed, Denied: see `exchange`.
    """
    return (await _answered(client, url)).text


async def _answered(client: httpx2.AsyncClient, url: str, body: dict[str, Any] | None = None) -> httpx2.Response:
    try:
        response = await client.request("GET" if body is None else "POST", url, json=body)
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise Refused(f"no connection ({_innermost(error)})") from None
    except httpx2.TimeoutException:
        raise Failed(f"no answer within {client.timeout.read or 0:,.0f} s") from None
    except httpx2.RequestError as error:  # it closed the connection, or sent no HTTP
        raise Failed(str(error).rstrip(".") or type(error).__name__) from None
    _check_status(response, client)
    return response


def _innermost(error: BaseException) -> str:
    """Return what the system says; the client says of every address that no attempt succeeded."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or "nothing answers"


def _check_status(response: httpx2.Response, client: httpx2.AsyncClient) -> None:
    code = response.status_code
    if code == 200:
        return
    said = _quoted(response, client)
    cause = f"{code} {response.reason_phrase}" + (f": {said}" if said else "")
    if code in (401, 403):
        raise Denied(cause)
    if code in (429, 503):
        raise Refused(cause, _retry_after_s(response))
    if code in (408, 409, 425) or code >= 500:
        raise Failed(cause, _retry_after_s(response))
    raise Rejected(cause)


def _quoted(response: httpx2.Response, client: httpx2.AsyncClient) -> str:
    """Return the start of what a server said, without the key, which some repeat."""
    text = response.text
    with suppress(ValueError, AttributeError):
        said = response.json()
        said = said.get("error") or said.get("detail") or said.get("message") or said
        text = str(said.get("message", said) if isinstance(said, dict) else said)
    if key := client.headers.get("authorization", "").removeprefix("Bearer "):
        text = text.replace(key, "***")
    return " ".join(text.split())[:300].rstrip(".")


def _retry_after_s(response: httpx2.Response) -> float:
    """Return what Retry-After says, a number of seconds or a date; 0 without it."""
    said = response.headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(said))
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(said).timestamp() - time.time())
    return 0.0
