"""The PII filter, as a library: no server, no I/O.

    filter = PiiFilter(tenant_key, epoch)
    request = filter.mask_openai_request(body)            # request.body goes to the model
    answer = request.session.restore_unary(response)      # or, streamed:
    stream = request.session.stream()
    chunk = stream.feed(chunk)                            # one chunk out for each chunk in
    last = stream.close()                                 # only where no finish_reason came

A session with `masked` False leaves every answer as it is, so its bytes may be forwarded unparsed.
"""

from sealmesh.gateway.pii.detector import Detector
from sealmesh.gateway.pii.filter import MaskedRequest, MaskedText, PiiFilter
from sealmesh.gateway.pii.restorer import Restorer
from sealmesh.gateway.pii.session import PiiSession, StreamRestorer
from sealmesh.gateway.pii.spans import Finding, PiiError, PiiRefusedError, Span


def detect(text: str) -> list[Span]:
    """Personal data in the text: spans in order, in code points, none overlapping another."""
    return Detector().detect(text)


def mask(text: str, tenant_key: bytes, epoch: int = 1) -> MaskedText:
    """Masks one text with the placeholders of a tenant's key; see PiiFilter for whole requests."""
    return PiiFilter(tenant_key, epoch).mask_text(text)


__all__ = [
    "Detector",
    "Finding",
    "MaskedRequest",
    "MaskedText",
    "PiiError",
    "PiiFilter",
    "PiiRefusedError",
    "PiiSession",
    "Restorer",
    "Span",
    "StreamRestorer",
    "detect",
    "mask",
]
