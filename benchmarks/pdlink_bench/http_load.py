"""Requests to an OpenAI-compatible server, timed at the client from the request's first byte."""

from __future__ import annotations

import http.client
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S = 300.0
"""Between two words of an answer. NIXL's first handshake lasted more than a minute on two cores now and then."""
_PREFILL = re.compile(r"\bprefill;dur=([0-9.]+)")


class WrongAnswer(Exception):
    """A server answered something that is no good answer."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    asked_s: float
    """When the request was sent, of `time.monotonic`."""
    first_s: float
    """From the request to the first token."""
    gaps_s: tuple[float, ...]
    """Between tokens that did not come together."""
    total_s: float
    prefill_s: float
    """What the prefill leg took by the proxy's account (Server-Timing); `first_s` if it had not answered then."""
    disaggregated: bool
    """Whether there was a prefill leg at all (X-Pdlink-Prefill)."""
    text: str


def once(url: str, body: dict[str, Any]) -> float:
    """Seconds that a request in one piece takes. Raises WrongAnswer, OSError, http.client.HTTPException."""
    connection, response, asked_s = _post(url, body)
    try:
        response.read()
    finally:
        connection.close()
    return time.monotonic() - asked_s


def once_and_cached(url: str, body: dict[str, Any]) -> tuple[float, int | None]:
    """The same, and how many tokens of the prompt the server had cached, if it says so."""
    connection, response, asked_s = _post(url, body)
    try:
        answer = response.read()
    finally:
        connection.close()
    took_s = time.monotonic() - asked_s
    try:
        usage = json.loads(answer)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
    except (ValueError, KeyError, TypeError):
        return took_s, None
    return took_s, cached if isinstance(cached, int) else None


def stream(url: str, body: dict[str, Any], request_id: str = "") -> StreamedAnswer:
    """request_id: what the server is to call it. Raises WrongAnswer, OSError, http.client.HTTPException."""
    connection, response, asked_s = _post(url, body, request_id)
    arrivals, text, done = [], [], False
    try:
        while line := response.readline():
            if not line.startswith(b"data:"):
                continue
            arrived_s = time.monotonic()
            payload = line[5:].strip()
            if payload == b"[DONE]":
                done = True
                continue
            event = json.loads(payload)
            if "error" in event:
                raise WrongAnswer(f"{url} ended a stream with {event['error']}")
            if event["choices"]:
                arrivals.append(arrived_s)
                text.append(event["choices"][0].get("text", ""))
        timing = _PREFILL.search(response.headers.get("Server-Timing", ""))
        disaggregated = "X-Pdlink-Prefill" in response.headers
    finally:
        connection.close()
    if not arrivals or not done:
        raise WrongAnswer(f"{url} ended a stream early")
    gaps = tuple(later - earlier for earlier, later in zip(arrivals, arrivals[1:], strict=False))
    first_s = arrivals[0] - asked_s
    prefill_s = float(timing.group(1)) / 1e3 if timing else first_s
    return StreamedAnswer(asked_s, first_s, gaps, arrivals[-1] - asked_s, prefill_s, disaggregated, "".join(text))


def in_parallel(url: str, bodies: Sequence[dict[str, Any]], parallel: int) -> float:
    """Seconds until all of them were answered, so many at a time."""
    started_s = time.perf_counter()
    with ThreadPoolExecutor(parallel) as threads:
        list(threads.map(lambda body: stream(url, body), bodies))
    return time.perf_counter() - started_s


def _post(
    url: str, body: dict[str, Any], request_id: str = ""
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, float]:
    """The connection, the begin of the answer, and when it was asked for, which is after the body was encoded."""
    encoded = json.dumps(body)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json", **({"X-Request-Id": request_id} if request_id else {})}
    asked_s = time.monotonic()
    connection.request("POST", "/v1/completions", encoded, headers)
    response = connection.getresponse()
    if response.status != 200:
        text = response.read()[:500].decode(errors="replace")
        connection.close()
        raise WrongAnswer(f"{url} answered {response.status}: {text}")
    return connection, response, asked_s
