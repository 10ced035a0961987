"""Spans of the connector as children of the request they belong to."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from sealmesh.telemetry.attributes import Attribute, AttributeValue, set_attributes
from sealmesh.telemetry.tracing import Tracing, remote_context

Attributes = Mapping[Attribute, AttributeValue]


class KVTrace:
    """Opens spans below a W3C traceparent; without one there is nothing to belong to and no span."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    @contextlib.contextmanager
    def span(
        self, name: str, traceparent: str, attributes: Attributes
    ) -> Iterator[Callable[[Attributes], None]]:
        """A current span; yields a function that adds attributes to it."""
        if not traceparent:
            yield lambda _: None
            return
        with self._tracing.span(name, attributes, parent=remote_context(traceparent)) as span:
            yield lambda more: set_attributes(span, more)
