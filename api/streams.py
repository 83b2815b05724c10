"""Answers that take long, and end with the token that they were asked for with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

ShutOut = Callable[[], Coroutine[Any, Any, None]]


class GuardedStream(StreamingResponse):
    """Is cut off when ``shut_out`` returns; who comes back is refused."""

    def __init__(
        self, pieces: AsyncIterator[bytes] | Iterable[bytes], shut_out: ShutOut, *rest: Any, **named: Any
    ) -> None:
        super().__init__(pieces, *rest, **named)
        self._shut_out = shut_out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            head = Response(status_code=self.status_code)
            head.raw_headers = self.raw_headers
            await head(scope, receive, send)
        elif not await ended_before(super().__call__(scope, receive, send), self._shut_out()):
            await self.cut(send)

    async def cut(self, send: Send) -> None:
        """Leave it without an end: uvicorn closes the connection then, and nobody takes what has come for all of it."""


async def ended_before(work: Coroutine[Any, Any, None], limit: Coroutine[Any, Any, None]) -> bool:
    """Do ``work`` until ``limit`` returns; return whether it came to its end, or raise its error."""
    working, limiting = asyncio.ensure_future(work), asyncio.ensure_future(limit)
    try:
        await asyncio.wait({working, limiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        limiting.cancel()
        working.cancel()
        await asyncio.wait({working})
    if working.cancelled():
        return False
    await working
    return True
