"""The one path that every request takes, whatever skin it came through.

The internal representation is an OpenAI request (path and decoded body) on the way in and a sequence of
OpenAI JSON documents on the way out: the shapes that the worker's engine speaks. Skins translate to and
from it; every filter works on it, so nothing can be masked in one skin and forgotten in another.

Order: deadline and role -> allow-list of fields -> privacy filter -> worker (once more on another one when
the first fails before its first document) -> restore -> meter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import grpc
import orjson
from sealmesh.gateway.access.identity import Principal
from sealmesh.gateway.engine_errors import engine_error, plain_message
from sealmesh.gateway.fields import MAX_CHOICES, JsonObject, admit
from sealmesh.gateway.privacy import MaskedBody, PrivacyFilter
from sealmesh.gateway.routing.pool import Worker, WorkerPool, not_ready
from sealmesh.protos.common.v1 import types_pb2
from sealmesh.protos.inference.v1 import inference_pb2
from sealmesh.telemetry.metrics import BoundedLabel
from sealmesh.telemetry.runtime.errors import SealmeshError
from sealmesh.telemetry.telemetry import Telemetry

__all__ = ["GRACE_S", "Answer", "Caller", "Pipeline"]

# How much longer than its deadline a request may take to write its last bytes, in seconds.
GRACE_S: Final = 1.0
_ATTEMPTS: Final = 2
_RETRYABLE: Final = frozenset({"MODEL_NOT_READY", "OVERLOADED", "ENGINE_FAILED", "DEPENDENCY_UNAVAILABLE"})
_PEER_GONE: Final = frozenset({"DEPENDENCY_UNAVAILABLE", "CANCELLED"})
_REFUSED_US: Final = frozenset({"CREDENTIAL_INVALID", "ROLE_DENIED"})
_ERROR_EVENT: Final = b'{"error"'
_ENGINE_FAILED: Final = "the engine failed; send the request again"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and until when.

    Attributes:
        principal: authenticated identity.
        request_id: unique; names the request in logs, spans and on the worker.
        deadline: `time.monotonic()` value after which nobody waits any more.
    """

    principal: Principal
    request_id: str
    deadline: float

    def remaining_s(self) -> float:
        """Seconds left; raises DEADLINE_EXCEEDED when there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise deadline_exceeded()
        return left


def deadline_exceeded() -> SealmeshError:
    """The error of a request that took too long."""
    return SealmeshError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
        "the answer was not complete before the deadline; ask for fewer tokens or allow more time",
    )


def _broken(how: str) -> SealmeshError:
    return SealmeshError(
        grpc.StatusCode.UNAVAILABLE,
        "ENGINE_FAILED",
        f"the worker's answer broke off {how}; send the request again",
        retry_after_s=2.0,
    )


class Answer:
    """What comes back: a status, then JSON documents, then usage. Use it as an async context manager.

    Leaving the block before the end cancels the RPC, which aborts the engine's request.

    Attributes:
        streamed: whether documents are chunks of a stream, or one whole body.
        findings: what the privacy filter found in the request.
        usage: counts by the engine; set once the documents have ended.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        worker: Worker,
        call: grpc.aio.UnaryStreamCall[inference_pb2.ServeOpenAIRequest, inference_pb2.ServeOpenAIResponse],
        masked: MaskedBody,
        model: str,
        path: str,
    ) -> None:
        self._pipeline = pipeline
        self._call = call
        self._masked = masked
        self._model = model
        self._path = path
        self._ready: list[bytes] = []
        self._sequence = 0
        self._ended = False
        self._error: SealmeshError | None = None
        self._status = 0
        self._resources = ExitStack()
        self._resources.enter_context(worker.in_use())
        self.worker = worker
        self.streamed = False
        self.usage: types_pb2.Usage | None = None
        self.findings = masked.findings

    async def open(self) -> None:
        """Read the head and the first document.

        Raises:
            SealmeshError: what the worker said, or how it failed.
        """
        message = await self._read()
        if message is None or message.WhichOneof("event") != "head":
            raise _broken("without a response head")
        self._status = message.head.status
        self.streamed = message.head.content_type.startswith("text/event-stream")
        await self._advance()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._documents()

    async def _documents(self) -> AsyncIterator[bytes]:
        """Restored documents in order; raises SealmeshError for an error of the engine or a broken stream."""
        while True:
            for document in self._ready:
                yield document
            self._ready = []
            if self._ended and self._error is not None:
                raise self._error
            if self._ended:
                return
            await self._advance()

    async def _advance(self) -> None:
        """Read until there is a document for the caller, or the end."""
        while not self._ready and not self._ended:
            message = await self._read()
            event = message.WhichOneof("event") if message is not None else None
            if message is None:
                raise _broken("before its end")
            if event == "json":
                if message.json.sequence != self._sequence:
                    raise _broken(f"at document {self._sequence} (got {message.json.sequence})")
                self._sequence += 1
                if self._status >= 400 or message.json.data.startswith(_ERROR_EVENT):
                    # The first error counts. What follows is read, so that the RPC ends as complete.
                    self._error = self._error or self._engine_error(message.json.data)
                elif self._error is None:
                    self._ready = self._restored(message.json.data)
            elif event == "finish":
                self._ended = True
                self.usage = message.finish.usage
                await self._settle()
                self._ready = self._masked.flush()
                self._pipeline.meter(self._model, self.usage)
            else:
                raise _broken("with an unexpected message")

    def _engine_error(self, document: bytes) -> SealmeshError:
        try:
            error = engine_error(self._status, orjson.loads(document), self._path)
        except orjson.JSONDecodeError:
            raise _broken("with a document that is not JSON") from None
        # An engine may quote the request in its complaint.
        return SealmeshError(
            error.code,
            error.reason,
            self._masked.restore_text(error.message),
            metadata=error.metadata,
            field=error.field,
            retry_after_s=error.retry_after_s,
        )

    def _restored(self, document: bytes) -> list[bytes]:
        try:
            return self._masked.restore(document, streamed=self.streamed)
        except orjson.JSONDecodeError:
            raise _broken("with a document that is not JSON") from None

    async def _settle(self) -> None:
        """Read the status behind the finish, so that the RPC ends as complete and not as cancelled."""
        try:
            await self._call.read()
        except grpc.aio.AioRpcError as error:
            # The answer is whole; how the worker tidied up is its own business.
            self._pipeline.note_untidy_end(error.code())

    async def _read(self) -> inference_pb2.ServeOpenAIResponse | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from None
        except asyncio.CancelledError:
            # Cancelled from our side (the caller has gone) unless the call itself was cancelled remotely.
            self._call.cancel()
            raise
        return None if message is grpc.aio.EOF else message  # type: ignore[return-value]

    def _translate(self, error: grpc.aio.AioRpcError) -> SealmeshError:
        meant = SealmeshError.from_rpc_error(error)
        if meant.reason in _REFUSED_US:
            # It is the gateway that was refused. The caller's own credential is good: no 401 or 403.
            self._pipeline.note_refused_by_worker(self.worker, meant)
            return SealmeshError(
                grpc.StatusCode.UNAVAILABLE,
                "DEPENDENCY_UNAVAILABLE",
                "the worker does not accept this gateway; tell the operator",
            )
        if meant.reason in _PEER_GONE:
            # The channel failed, or a server that stopped cancelled the call: nobody is there to say more.
            if self._sequence:
                return SealmeshError(
                    grpc.StatusCode.UNAVAILABLE,
                    "ENGINE_FAILED",
                    "the worker stopped in the middle of the answer; send the request again",
                    retry_after_s=2.0,
                )
            return not_ready("the worker is restarting or out of reach; try again shortly")
        if meant.reason == "DEADLINE_EXCEEDED":
            return deadline_exceeded()
        if meant.reason == "ENGINE_FAILED":
            return SealmeshError(
                meant.code,
                meant.reason,
                plain_message(meant.message) or _ENGINE_FAILED,
                metadata=meant.metadata,
                field=meant.field,
                retry_after_s=meant.retry_after_s,
            )
        return meant

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the worker; cancels the RPC when it has not ended."""
        if not self._ended:
            self._call.cancel()
        self._resources.close()


class Pipeline:
    """The filters and the worker pool behind every skin.

    Args:
        pool: workers.
        privacy: PII filter; when it fails, the request fails and no worker is called.
        telemetry: spans `pii.mask` and `pii.restore`, token counters.
        max_choices: largest `n` of a request.
    """

    def __init__(
        self,
        pool: WorkerPool,
        privacy: PrivacyFilter,
        telemetry: Telemetry,
        *,
        max_choices: int = MAX_CHOICES,
    ) -> None:
        self._max_choices = max_choices
        self._pool = pool
        self._privacy = privacy
        self._log = telemetry.log
        self._model_label = BoundedLabel()
        self._tokens = telemetry.metrics.counter(
            "gen_ai_client_tokens", "Tokens that the model saw and made.", ("model", "kind")
        )
        self._retries = telemetry.metrics.counter(
            "sealmesh_gateway_retries", "Requests that went to a second worker."
        )

    @property
    def privacy(self) -> PrivacyFilter:
        """The filter, for skins that offer it alone."""
        return self._privacy

    async def infer(self, path: str, body: JsonObject, caller: Caller) -> Answer:
        """Answer one OpenAI request.

        Args:
            path: a path of `gateway.fields`, for example "/v1/chat/completions".
            body: decoded request; not changed.
            caller: who asks.

        Returns:
            An open answer: its first document (or its end) is there. The caller must close it.

        Raises:
            SealmeshError: refused, or no worker could begin to answer.
        """
        caller.principal.require("infer")
        admitted = admit(path, body, max_choices=self._max_choices)
        model = str(admitted["model"])
        # Before the filter's work: a name that nobody serves needs no masking.
        worker = self._pool.pick(model)
        masked = await self._privacy.mask(admitted, caller.principal)
        request = inference_pb2.ServeOpenAIRequest(
            request_id=caller.request_id,
            path=path,
            body=masked.body,
            tenant=caller.principal.context,
        )
        tried: list[Worker] = []
        while True:
            tried.append(worker)
            answer = Answer(
                self,
                worker,
                worker.stub.ServeOpenAI(request, timeout=caller.remaining_s()),
                masked,
                model,
                path,
            )
            try:
                await answer.open()
            except SealmeshError as error:
                answer.close()
                if error.reason not in _RETRYABLE or len(tried) >= _ATTEMPTS:
                    raise
                try:
                    worker = self._pool.pick(model, exclude=tried)
                except SealmeshError:
                    raise error from None
                self._retries.inc()
                self._log.warning(
                    "request goes to a second worker", request_id=caller.request_id, reason=error.reason
                )
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    def note_untidy_end(self, code: grpc.StatusCode) -> None:
        """Log that a worker's RPC failed after its answer was complete."""
        self._log.debug("worker failed after its finish", code=code.name)

    def note_refused_by_worker(self, worker: Worker, error: SealmeshError) -> None:
        """Log that a worker refused the gateway itself."""
        self._log.error(
            "worker refuses this gateway: check tls_certificate and the worker's role rules",
            worker=worker.address,
            reason=error.reason,
            cause=error.message,
        )

    def meter(self, model: str, usage: types_pb2.Usage) -> None:
        """Count the tokens of one answer."""
        label = self._model_label(model)
        self._tokens.labels(label, "input").inc(usage.prompt_tokens)
        self._tokens.labels(label, "output").inc(usage.completion_tokens)
        self._tokens.labels(label, "cached").inc(usage.cached_tokens)
