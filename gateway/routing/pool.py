"""Which workers there are, what they serve, and which one takes the next request."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from sealmesh.protos.inference.v1 import inference_pb2, inference_pb2_grpc
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.runtime.channel import cancelled_on_exit
from sealmesh.telemetry.runtime.errors import SealmeshError

_Status = health_pb2.HealthCheckResponse.ServingStatus
SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_PROBE_TIMEOUT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0
_RETRY_AFTER_S: Final = 2.0

ChannelFactory = Callable[[str], grpc.aio.Channel]


def _unsampled() -> tuple[tuple[str, str], ...]:
    """Metadata that keeps a call out of every trace (W3C Trace Context): probes are not requests."""
    return (("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"),)


class Worker:
    """One worker as the gateway sees it.

    Attributes:
        address: host and port.
        stub: calls to it for callers' requests.
        probe: calls that only ask how it is; they are neither traced nor measured.
        health: its health service, likewise.
        info: what it last said of its model, or None when it has never answered.
        serving: whether its health service says that it can answer now.
        outstanding: requests that this gateway has sent and that have not ended.
    """

    def __init__(self, address: str, channel: grpc.aio.Channel, probe_channel: grpc.aio.Channel) -> None:
        self.address = address
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.probe = inference_pb2_grpc.InferenceServiceStub(probe_channel)
        self.health = health_pb2_grpc.HealthStub(probe_channel)
        self.channels = (channel, probe_channel)
        self.info: inference_pb2.GetModelInfoResponse | None = None
        self.serving = False
        self.outstanding = 0

    @property
    def ready(self) -> bool:
        """Whether it may be given a request."""
        return self.serving and self.info is not None

    def serves(self, model: str) -> bool:
        """Whether ``model`` is the name or an alias of what it serves."""
        return self.info is not None and (model == self.info.model or model in self.info.aliases)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Counts one outstanding request."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name under which the mesh answers.

    Attributes:
        name: the name or alias.
        info: what a worker says of it; of a ready worker if there is one.
        ready: whether any worker can answer now.
        since: when this gateway first saw it, seconds since 1970.
    """

    name: str
    info: inference_pb2.GetModelInfoResponse
    ready: bool
    since: int


class WorkerPool:
    """Channels to the configured workers, watched by their health service.

    Args:
        addresses: host:port of each worker.
        open_channel: makes the (mutually authenticated) channel to one address.
        open_probe_channel: the same without telemetry; gRPC lets both share one connection.
        log: where changes of state go.
        refresh_s: how often a serving worker is asked for its model's facts, in seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        open_channel: ChannelFactory,
        open_probe_channel: ChannelFactory,
        log: StructuredLogger,
        *,
        refresh_s: float = 5.0,
    ) -> None:
        self._addresses = tuple(dict.fromkeys(addresses))
        self._open_channel = open_channel
        self._open_probe_channel = open_probe_channel
        self._log = log
        self._refresh_s = refresh_s
        self._workers: tuple[Worker, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._since: dict[str, int] = {}
        self._turn = 0
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Open the channels and begin to watch; does not wait for workers."""
        self._workers = tuple(
            Worker(address, self._open_channel(address), self._open_probe_channel(address))
            for address in self._addresses
        )
        for worker in self._workers:
            self._tasks.append(asyncio.create_task(self._watch(worker)))
            self._tasks.append(asyncio.create_task(self._refresh(worker)))

    async def close(self) -> None:
        """Stop watching and close the channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for worker in self._workers:
            for channel in worker.channels:
                await channel.close()
        self._workers = ()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All configured workers."""
        return self._workers

    @property
    def ready(self) -> bool:
        """Whether at least one worker can answer."""
        return any(worker.ready for worker in self._workers)

    async def wait_ready(self, at_least: int = 1) -> None:
        """Return once so many workers can answer."""
        while sum(worker.ready for worker in self._workers) < at_least:
            self._changed.clear()
            await self._changed.wait()

    def models(self) -> list[ServedModel]:
        """Every name that is or was served, in order of name."""
        best: dict[str, Worker] = {}
        for worker in self._workers:
            if worker.info is not None:
                for name in (worker.info.model, *worker.info.aliases):
                    if name not in best or (worker.ready and not best[name].ready):
                        best[name] = worker
        return [
            ServedModel(name, worker.info, worker.ready, self._since.get(name, 0))
            for name, worker in sorted(best.items())
            if worker.info is not None
        ]

    def find(self, model: str) -> ServedModel:
        """One served name; raises MODEL_NOT_FOUND, or MODEL_NOT_READY while a worker may yet bring it."""
        for served in self.models():
            if served.name == model:
                return served
        raise self._none_for(model)

    def pick(self, model: str, exclude: Collection[Worker] = ()) -> Worker:
        """The ready worker with the fewest outstanding requests.

        Raises:
            SealmeshError: MODEL_NOT_FOUND when every worker is known and none serves the name;
                MODEL_NOT_READY, with a time to retry after, when none can answer now.
        """
        candidates = [
            worker
            for worker in self._workers
            if worker.ready and worker not in exclude and worker.serves(model)
        ]
        if not candidates:
            raise self._none_for(model)
        # Ties go round, so that idle workers share the load.
        self._turn += 1
        start = self._turn % len(candidates)
        return min(candidates[start:] + candidates[:start], key=lambda worker: worker.outstanding)

    def _none_for(self, model: str) -> SealmeshError:
        shown = model if len(model) <= 100 else model[:99] + "…"
        known = any(worker.serves(model) for worker in self._workers)
        unseen = [worker.address for worker in self._workers if worker.info is None]
        if known:
            return not_ready(
                f"the worker of model '{shown}' is restarting or out of reach; try again shortly"
            )
        if unseen:
            return not_ready(f"no worker has reported yet ({', '.join(unseen)}); try again shortly")
        return SealmeshError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"The model `{shown}` does not exist; GET /v1/models (gRPC: ListModels) lists those that do.",
            field="model",
        )

    async def _watch(self, worker: Worker) -> None:
        """Follow the health of one worker until cancelled."""
        pause = _FIRST_PAUSE_S
        while True:
            reason = "its health service ended the watch"
            try:
                request = health_pb2.HealthCheckRequest(service=SERVICE)
                with cancelled_on_exit(worker.health.Watch(request, metadata=_unsampled())) as updates:
                    async for update in updates:
                        pause = _FIRST_PAUSE_S
                        if update.status == _Status.SERVING:
                            await self._ask(worker)
                            self._set_serving(worker, True, "")
                        else:
                            self._set_serving(worker, False, f"health is {_Status.Name(update.status)}")
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            self._set_serving(worker, False, reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _refresh(self, worker: Worker) -> None:
        """Ask a serving worker for its facts now and then: a reload changes the model's version."""
        while True:
            await asyncio.sleep(self._refresh_s)
            if worker.serving:
                try:
                    await self._ask(worker)
                except grpc.aio.AioRpcError as error:
                    # The watch decides about health; this only keeps facts fresh.
                    self._log.warning(
                        "worker did not describe its model", worker=worker.address, code=error.code().name
                    )

    async def _ask(self, worker: Worker) -> None:
        info = await worker.probe.GetModelInfo(
            inference_pb2.GetModelInfoRequest(), timeout=_PROBE_TIMEOUT_S, metadata=_unsampled()
        )
        for name in (info.model, *info.aliases):
            self._since.setdefault(name, int(time.time()))
        worker.info = info

    def _set_serving(self, worker: Worker, serving: bool, reason: str) -> None:
        if worker.serving == serving:
            return
        worker.serving = serving
        self._changed.set()
        if serving:
            self._log.info(
                "worker is ready", worker=worker.address, model=worker.info.model if worker.info else ""
            )
        else:
            self._log.warning("worker is not ready", worker=worker.address, reason=reason)


def not_ready(message: str) -> SealmeshError:
    """MODEL_NOT_READY with a time to retry after."""
    return SealmeshError(
        grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_READY", message, retry_after_s=_RETRY_AFTER_S
    )
