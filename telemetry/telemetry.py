"""What a process observes itself with: built once in `__main__`, passed down, closed last."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from opentelemetry.trace import Tracer
from sealmesh.telemetry.logging import StructuredLogger, configure_logging
from sealmesh.telemetry.metrics import Metrics
from sealmesh.telemetry.runtime.settings import ServiceSettings
from sealmesh.telemetry.tracing import Tracing

__all__ = ["Telemetry"]


@dataclass(frozen=True)
class Telemetry:
    """Tracing, metrics and logs of one process."""

    service: str
    tracing: Tracing
    metrics: Metrics
    log: StructuredLogger

    @property
    def tracer(self) -> Tracer:
        """The OpenTelemetry tracer, for code that needs more than `tracing.span`."""
        return self.tracing.tracer

    @classmethod
    def build(cls, service: str, settings: ServiceSettings) -> Telemetry:
        """Telemetry as the settings ask for; also points this process's log at stderr.

        Args:
            service: `service.name`: gateway, worker, kvstore or vault.
            settings: where spans go, how logs look.
        """
        return cls(
            service=service,
            tracing=Tracing(
                service,
                otlp_endpoint=settings.otlp_endpoint,
                trace_dir=settings.trace_dir,
                sample_ratio=settings.trace_sample_ratio,
            ),
            metrics=Metrics(service),
            log=configure_logging(service, settings.log_level, settings.log_format),
        )

    async def close(self) -> None:
        """Flushes spans, off the event loop."""
        await asyncio.to_thread(self.tracing.close)
