"""`Contents`: content in the place of tokens, such as embeddings or images, with numbers in the place of token ids."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from canary_core.kinds.facts import CONTENT
from canary_core.ops.upload import upload
from canary_core.records import FIRST_CONTENT, Kind, Phase
from canary_core.runtime.identities import told
from canary_core.violation import Violation

UNTOLD = FIRST_CONTENT
"""The number of content that nobody has digested. It is never compared with another content's."""

MOST_NUMBERS = 1 << 22
"""Numbers that are remembered, of all requests together; those of the oldest requests go first."""

ONE_NUMBER = 16
"""Share of a span in `MOST_NUMBERS`, beside its numbers."""


class Span(NamedTuple):
    """Positions ``begin`` to ``end`` of a request have ``what``, with ``numbers``, int32 ``[end - begin]`` on the
    host, in the place of token ids."""

    begin: int
    end: int
    numbers: Tensor
    what: str


class Contents:
    """Content of requests in the place of tokens. A number stands for the content of a position: in the records of
    slots, in `BatchView.token_ids` and in `BatchView.expected_tokens`. So KV of another content under the same
    placeholder tokens is found like another token's, and told as a `prefix` finding that names both contents.

    ``untold``: positions whose content has no number of its own, for want of a digest. ``forgotten``: requests beyond
    `MOST_NUMBERS`, which count as such with tokens.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, list[Span]] = OrderedDict()
        self._named: dict[str, str] = {}
        self._kept = 0
        self.untold = 0
        self.forgotten = 0

    def put(self, request: str, begin: int, numbers: Tensor, what: str) -> None:
        """From position ``begin`` on, ``request`` has ``what``, in words for findings, in the place of tokens.
        ``numbers``: integers ``[n]`` on the host, one for each position, of at least `FIRST_CONTENT`, or tokens of the
        engine's own that stand for the content; `UNTOLD` where there is no digest. A tensor that is
        expanded from one number costs no memory. Holds until `forget`; to be called where the request begins, after
        `Writers.forget`."""
        if not len(numbers):
            return
        name = told(request)
        numbers = numbers.to(torch.int32)
        self.untold += int((numbers == UNTOLD).sum())
        self._of.setdefault(name, []).append(Span(begin, begin + len(numbers), numbers, what))
        self._of.move_to_end(name)
        self._kept += _cost(numbers)
        while self._kept > MOST_NUMBERS and len(self._of) > 1:
            self._drop(next(iter(self._of)))
            self.forgotten += 1

    def name(self, region: str, what: str) -> None:
        """In ``region`` content is ``what``, in words for findings, where no request's own words are known."""
        self._named[region] = what

    def forget(self, request: str) -> None:
        """Ends what is known of the request."""
        if self._of:
            self._drop(told(request))

    def over(self, request: str, tokens: Tensor) -> Tensor:
        """``tokens`` of the request from position 0 on, int64 ``[n]`` on the host, with numbers in the place of those
        that stand for content, and -1 where these are `UNTOLD`: for `BatchView.expected_tokens`. The same tensor where
        there is none."""
        spans = self._of.get(told(request))
        if spans is None:
            return tokens
        tokens = tokens.clone()
        for span in spans:
            end = min(span.end, len(tokens))
            if span.begin < end:
                numbers = span.numbers[: end - span.begin].to(tokens.dtype)
                tokens[span.begin : end] = torch.where(numbers == UNTOLD, -1, numbers)
        return tokens

    def given(self, requests: Sequence[str], begins: Sequence[int], counts: Sequence[int], token_ids: Tensor) -> Tensor:
        """`BatchView.token_ids` of a forward with numbers in the place of those that stand for content: itself, or a
        copy by one launch and one copy from pinned memory. ``begins``, ``counts``: each row's tokens before the
        forward, and new ones."""
        if self._of.keys().isdisjoint(map(told, requests)):
            return token_ids
        places: list[Tensor] = []
        first = 0
        for request, begin, count in zip(requests, begins, counts, strict=True):
            for span in self._of.get(told(request), ()):
                low, high = max(span.begin, begin), min(span.end, begin + count)
                if low < high:
                    index = torch.arange(first + low - begin, first + high - begin, device="cpu")
                    places.append(torch.stack((index, span.numbers[low - span.begin : high - span.begin].long())))
            first += count
        if not places:
            return token_ids
        index, numbers = upload(torch.cat(places, 1), token_ids.device)
        return token_ids.index_copy(0, index, numbers.to(token_ids.dtype))

    def tell(self, found: Violation) -> Violation:
        """A finding of kind `token` as one of kind `prefix` with both contents, where the reader or the slot has
        content in the place of a token; others as they are."""
        if found.kind is not Kind.TOKEN or found.phase is not Phase.PRE_FORWARD or found.position is None:
            return found
        own = self._at(found.request, found.position, found.token)
        other = self._at(found.stored_request, found.position, found.stored_token)
        if own is None and other is None and not _stands(found.token) and not _stands(found.stored_token):
            return found
        where, what = own or other, self._named.get(found.region)
        place = f" {found.position}" if where is None or where.end - where.begin == 1 else (
            f"s {where.begin} to {where.end - 1}"
        )  # fmt: skip
        return replace(
            found,
            kind=Kind.PREFIX,
            identity=f"{CONTENT}{place} {_said(own, found.token, what)}",
            stored_identity=_said(other, found.stored_token, what),
        )

    def undecided(self, found: Violation) -> bool:
        """Whether the contents of reader and slot may be the same, since one of them has no number of its own."""
        return UNTOLD in (found.token, found.stored_token) and _stands(found.token) and _stands(found.stored_token)

    def _at(self, request: str | None, position: int, number: int | None) -> Span | None:
        for span in self._of.get(request or "", ()):
            if span.begin <= position < span.end and int(span.numbers[position - span.begin]) == number:
                return span
        return None

    def _drop(self, name: str) -> None:
        for span in self._of.pop(name, ()):
            self._kept -= _cost(span.numbers)


def _cost(numbers: Tensor) -> int:
    return ONE_NUMBER + (1 if numbers.stride(0) == 0 else len(numbers))


def _stands(number: int | None) -> bool:
    return number is not None and number >= FIRST_CONTENT


def _said(span: Span | None, number: int | None, what: str | None) -> str:
    if span is not None:
        return span.what
    if what is not None and number is not None and _stands(number):
        return f"{what} #{number - FIRST_CONTENT:08x}"
    return "content that is not known any more" if _stands(number) else "tokens"
