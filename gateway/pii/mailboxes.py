"""Finds mailboxes (RFC 5321, as people write them: no quoted local parts, no address literals)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sealmesh.gateway.pii.candidates import Candidate
from sealmesh.gateway.pii.normalize import View

_PRIORITY = 10
# Image and style files whose names look like mailboxes ("icon@2x.png").
_FILE_SUFFIXES = frozenset(
    {"png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "css", "js", "ts", "json", "html"}
)
_DOMAIN_RE = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])", re.ASCII
)
_LOCAL_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._%+-")
_MAX_LOCAL = 64
_MAX_DOMAIN = 253


def _mailbox_at(text: str, at: int) -> tuple[int, int] | None:
    """The mailbox around the "@" at index `at`, or None. Looks at a bounded stretch on either side."""
    start = at
    floor = max(0, at - _MAX_LOCAL)
    while start > floor and (text[start - 1] in _LOCAL_CHARS):
        start -= 1
    while start < at and text[start] in ".%+-":
        start += 1
    if start == at or text[at - 1] == ".":
        return None
    domain = _DOMAIN_RE.match(text, at + 1, at + 1 + _MAX_DOMAIN)
    if domain is None:
        return None
    suffix = domain[0].rpartition(".")[2].lower()
    if suffix in _FILE_SUFFIXES:
        return None
    return start, domain.end()


class MailboxScanner:
    """Scans for mailboxes around every "@"."""

    def scan(self, view: View, context: str) -> Iterator[Candidate]:
        """Candidates of type EMAIL; the context says nothing about them."""
        text = view.text
        at = text.find("@")
        while at >= 0:
            mailbox = _mailbox_at(text, at)
            if mailbox is not None:
                yield Candidate(mailbox[0], mailbox[1], "EMAIL", 0.95, True, _PRIORITY)
            at = text.find("@", at + 1)
