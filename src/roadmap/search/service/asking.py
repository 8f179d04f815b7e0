"""What the routes share: the service behind a request, its patience, and its limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Request

from roadmap.search.service.core import Served, Service, Wait
from roadmap.search.service.gate import client_of
from roadmap.search.service.limits import Limits, Refusal
from roadmap.search.service.schema import Problem

# What any route may answer, for the description of the interface.
WORDS = {
    400: "The request cannot be read.",
    401: "The key is missing or wrong.",
    403: "Not allowed.",
    404: "No such index, row or picture.",
    408: "The request did not arrive in time.",
    409: "The index cannot do this as it is served.",
    413: "Too large.",
    415: "Not a picture that is read.",
    421: "Another host's name.",
    422: "Something in the request cannot be; it says what.",
    429: "Too many queries.",
    503: "Busy, or stopping.",
    504: "No answer in time.",
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": words} for status, words in WORDS.items()
}


class Asked:
    """A request to one index."""

    def __init__(self, request: Request, service: Service, served: Served) -> None:
        self.service, self.served, self.limits = service, served, service.limits
        deadline = request.scope.get("deadline", asyncio.get_running_loop().time() + service.limits.seconds)
        self.wait = Wait(deadline, request.receive)
        self._request = request

    def charge(self, count: int, what: str = "queries") -> None:
        """Refuse too many at once; the first of a request was paid for at the gate."""
        if count > self.limits.batch:
            raise Refusal(413, f"{count} {what} in one request; at most {self.limits.batch} are allowed")
        if count > 1:
            self._request.app.state.rates.take(client_of(self._request.scope), count - 1)

    def check_page(self, k: int, offset: int) -> None:
        if k > self.limits.results:
            raise Refusal(422, f"k={k}: at most {self.limits.results} results are given at once; ask for pages")
        if offset + k > self.limits.depth:
            raise Refusal(422, f"offset + k = {offset + k}: pages go down to {self.limits.depth}; filter instead")

    def check_writable(self) -> None:
        if not self.served.index.storage.writable:
            said = f"{self.served.name} is served for searching; start the service with --write to change it"
            raise Refusal(403, said)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def asked_of(request: Request, index: str) -> Asked:
    service = service_of(request)
    return Asked(request, service, service.named(index))


OneIndex = Annotated[Asked, Depends(asked_of)]


def parsed(text: str | None, what: str, limits: Limits) -> Any:
    """A form field that holds JSON; None where it is empty."""
    if not text:
        return None
    if len(text) > limits.text:
        raise Refusal(413, f"{what} is too long")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(422, f"{what} must be JSON: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def where_of(text: str | None, limits: Limits) -> dict[str, Any]:
    found = parsed(text, "where", limits)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Refusal(422, 'where must be a JSON object such as {"label": "owl"}')
    return found


def boxes_of(text: str | None, count: int, limits: Limits) -> Sequence[Sequence[float] | None]:
    """One box or null for each picture."""
    found = parsed(text, "boxes", limits)
    if found is None:
        return [None] * count
    if not isinstance(found, list) or len(found) != count:
        raise Refusal(422, f"boxes must be a JSON list with one [x, y, width, height] or null for each of {count}")
    for box in found:
        numbers = isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))
        if box is not None and not numbers:
            raise Refusal(422, f"a box is [x, y, width, height] in pixels or null, got {json.dumps(box)[:80]}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
