"""The store with what it needs to run: the embedded server if any, and a probe that readiness follows."""

import asyncio
import os

from sealmesh.kvstore.embedded import EmbeddedRedis
from sealmesh.kvstore.metrics import KVStoreMetrics
from sealmesh.kvstore.redis_store import RedisOptions, RedisStore, redacted
from sealmesh.kvstore.settings import KVStoreSettings
from sealmesh.kvstore.store import Store, StoreUnavailableError
from sealmesh.telemetry.logging import StructuredLogger
from sealmesh.telemetry.runtime.health import READY, Readiness
from sealmesh.telemetry.tracing import Tracing


class Backend:
    """Redis as the settings say, started and closed as one component."""

    def __init__(
        self,
        settings: KVStoreSettings,
        tracing: Tracing,
        metrics: KVStoreMetrics,
        logger: StructuredLogger,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._logger = logger
        self._embedded: EmbeddedRedis | None = None
        if not settings.redis_url:
            self._embedded = EmbeddedRedis(
                settings.data_dir,
                max_memory_bytes=settings.max_memory_bytes,
                logger=logger,
                start_timeout_s=settings.embedded_start_timeout_ms / 1e3,
                on_restart=metrics.restarted,
            )
        options = RedisOptions(
            url=self._url,
            connections=settings.redis_connections,
            connect_timeout_ms=settings.connect_timeout_ms,
            command_timeout_ms=settings.command_timeout_ms,
        )
        self._store = RedisStore(options, tracing, metrics)
        self._probe: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._readiness = Readiness(False, "Redis is starting")

    @property
    def store(self) -> Store:
        """The store; usable between start and close."""
        return self._store

    def ready(self) -> Readiness:
        """Whether Redis answered the last probe."""
        return self._readiness

    async def start(self) -> None:
        """Starts and connects.

        Raises:
            StoreUnavailableError: The embedded server does not start, or the configured one does not answer.
        """
        try:
            if self._embedded is not None:
                await self._embedded.start()
            await self._store.start()
        except StoreUnavailableError as error:
            await self.close()
            if self._embedded is not None:
                raise
            raise _unusable(self._settings.redis_url, error) from error
        self._answered()
        self._probe = asyncio.create_task(self._watch(), name="redis-probe")

    async def close(self) -> None:
        """Disconnects and stops the embedded server; its data stays."""
        # The flag ends the probe also where a library under it swallows the cancellation.
        self._closing.set()
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe})
        await self._store.close()
        if self._embedded is not None:
            await self._embedded.close()

    async def _watch(self) -> None:
        while not self._closing.is_set():
            await asyncio.sleep(self._settings.probe_interval_ms / 1e3)
            try:
                await self._store.ping()
            except StoreUnavailableError as error:
                if self._readiness.ok:
                    self._logger.warning("Redis does not answer; lookups are misses", cause=error.message)
                self._readiness = Readiness(False, error.message)
                self._metrics.redis_up(False)
            else:
                if not self._readiness.ok:
                    self._logger.info("Redis answers again")
                self._answered()

    def _answered(self) -> None:
        self._readiness = READY
        self._metrics.redis_up(True)

    def _url(self) -> str:
        return self._embedded.url if self._embedded is not None else self._settings.redis_url


def _unusable(url: str, error: StoreUnavailableError) -> StoreUnavailableError:
    """The one line for a person whose configured server cannot be used."""
    return StoreUnavailableError(
        f"kvstore.redis_url = {redacted(url)} cannot be used ({_cause(error)}): start Redis there, correct "
        "kvstore.redis_url, or run without a store: sealmesh up --no-kvstore"
    )


def _cause(error: BaseException) -> str:
    """The operating system's words when it has some (the client buries them), else the client's own."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for link in chain:
        if isinstance(link, OSError) and link.errno:
            # Negative ones are the resolver's, whose text only the error has.
            return os.strerror(link.errno) if link.errno > 0 else str(link.strerror)
    text = str(chain[1] if len(chain) > 1 else error)
    return " ".join(text.split()).rstrip(".")
