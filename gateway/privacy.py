"""The privacy filter in the pipeline: the PII library with deadlines, spans, counts and typed errors.

It fails closed: a filter that raises or takes too long refuses the request, and no worker is called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, cast

import grpc
import orjson
from sealmesh.gateway.access.identity import Principal
from sealmesh.gateway.fields import JsonObject
from sealmesh.gateway.pii.filter import MaskedText, PiiFilter
from sealmesh.gateway.pii.session import PiiSession, StreamRestorer
from sealmesh.gateway.pii.spans import Finding, PiiRefusedError
from sealmesh.telemetry.attributes import Attribute, set_attributes
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.telemetry import Telemetry

__all__ = ["MaskedBody", "PrivacyFilter"]

# Above this many bytes the filter runs beside the event loop, so that other requests go on.
_INLINE_BYTES: Final = 16 * 1024
_THREADS: Final = 2

_Result = TypeVar("_Result")


class MaskedBody:
    """A request as the model may see it, and the way back for its answer.

    Attributes:
        body: JSON for the worker.
        findings: what was found, without the values.
    """

    def __init__(self, body: bytes, session: PiiSession, telemetry: Telemetry) -> None:
        self.body = body
        self.findings: Sequence[Finding] = session.findings
        self._session = session
        self._telemetry = telemetry
        self._stream: StreamRestorer | None = None
        self._began_ns = 0

    def restore(self, document: bytes, *, streamed: bool) -> list[bytes]:
        """Documents to send on for one document of the worker, values put back. Usually one."""
        if not self._session.masked:
            return [document]
        if not streamed:
            with self._telemetry.tracing.span("pii.restore"):
                return [orjson.dumps(self._session.restore_unary(orjson.loads(document)))]
        if self._stream is None:
            self._stream = self._session.stream()
            self._began_ns = time.time_ns()
        return [orjson.dumps(self._stream.feed(orjson.loads(document)))]

    def flush(self) -> list[bytes]:
        """What is still held back when the worker's documents have ended."""
        if self._stream is None:
            return []
        rest = self._stream.close()
        self._stream = None
        span = self._telemetry.tracer.start_span("pii.restore", start_time=self._began_ns)
        span.end()
        return [] if rest is None else [orjson.dumps(rest)]

    def restore_text(self, text: str) -> str:
        """A whole text, values put back."""
        return self._session.restore_text(text) if self._session.masked else text


class PrivacyFilter:
    """Masks requests of all tenants.

    Args:
        telemetry: span `pii.mask`, counter of findings by type.
        timeout_s: longest time for one request, in seconds.
        make_filter: builds the filter of one tenant's epoch from its key.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        timeout_s: float = 5.0,
        make_filter: Callable[[bytes, int], PiiFilter] = PiiFilter,
    ) -> None:
        self._telemetry = telemetry
        self._timeout_s = timeout_s
        self._make_filter = make_filter
        self._filters: dict[tuple[bytes, int], PiiFilter] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._found = telemetry.metrics.counter(
            "sealmesh_pii_findings", "Personal data found in requests.", ("type", "action")
        )

    async def start(self) -> None:
        """Make the threads for large requests."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pii")

    async def close(self) -> None:
        """Let the threads go."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def mask(self, body: JsonObject, principal: Principal) -> MaskedBody:
        """Mask an OpenAI request body.

        Raises:
            SealmeshError: FIELD_REFUSED or PII_BLOCKED with the field; DEPENDENCY_UNAVAILABLE when the filter
                itself fails.
        """
        encoded = orjson.dumps(body)
        tenant = self._filter(principal)
        with self._telemetry.tracing.span("pii.mask", {Attribute.TEXT_CHARS: len(encoded)}) as span:
            masked = await self._run(
                lambda: tenant.mask_openai_request(cast("dict[str, object]", body)), len(encoded)
            )
            session = masked.session
            self._count(session)
            set_attributes(span, {Attribute.PII_FINDINGS: len(session.findings)})
            if session.counts:
                set_attributes(span, {Attribute.PII_TYPES: ",".join(sorted(session.counts))})
        return MaskedBody(orjson.dumps(masked.body) if session.masked else encoded, session, self._telemetry)

    async def mask_text(self, text: str, principal: Principal) -> MaskedText:
        """Mask one text; raises as `mask`."""
        tenant = self._filter(principal)
        with self._telemetry.tracing.span("pii.mask", {Attribute.TEXT_CHARS: len(text)}):
            masked = await self._run(lambda: tenant.mask_text(text, "/text"), len(text))
        self._count(masked.session)
        return masked

    async def _run(self, work: Callable[[], _Result], size: int) -> _Result:
        try:
            if size <= _INLINE_BYTES:
                return work()
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(self._timeout_s):
                return await loop.run_in_executor(self._threads, work)
        except PiiRefusedError as error:
            raise _refusal(error) from None
        except TimeoutError:
            self._telemetry.log.error("privacy filter took too long", size_bytes=size)  # noqa: TRY400
            raise _unavailable() from None
        except Exception as error:  # noqa: BLE001  # fails closed, whatever it was
            # Only the type: the message of an unforeseen exception may quote the text.
            self._telemetry.log.error("privacy filter failed", error=type(error).__name__)  # noqa: TRY400
            raise _unavailable() from None

    def _filter(self, principal: Principal) -> PiiFilter:
        key = (principal.pii_key, principal.context.epoch)
        found = self._filters.get(key)
        if found is None:
            found = self._filters[key] = self._make_filter(*key)
        return found

    def _count(self, session: PiiSession) -> None:
        for finding in session.findings:
            self._found.labels(finding.type, finding.action).inc()


def _refusal(error: PiiRefusedError) -> SealmeshError:
    field = error.field.lstrip("/").replace("/", ".")
    message = f"field {field!r} {error}"
    if error.reason == "PII_BLOCKED":
        return SealmeshError(grpc.StatusCode.PERMISSION_DENIED, "PII_BLOCKED", message, field=field)
    return SealmeshError(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_REFUSED", message, field=field)


def _unavailable() -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.UNAVAILABLE,
        "DEPENDENCY_UNAVAILABLE",
        "the privacy filter failed, so the request was not sent to a model; try again or tell the operator",
        retry_after_s=1.0,
    )
