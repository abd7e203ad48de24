"""Content in the place of tokens, for `Writers.contents`: numbers of embeddings, and of media by the engine's key."""

from hashlib import blake2b

import torch
from torch import Tensor

from canary_core import Writers
from canary_core.ops.hashing import keys, splitmix
from canary_core.records import FIRST_CONTENT
from canary_core.runtime.contents import UNTOLD

MOST_EMBEDDINGS = 65536
"""Embeddings of a request with a digest; later ones count as `contents_untold`."""

SAMPLED_WORDS = 64
"""Words of 8 bytes that are read of each embedding, evenly over it: all of one of up to 512 bytes."""


def put_embeddings(writers: Writers, request: str, positions: range | list[int] | Tensor, rows: Tensor) -> None:
    """The request has the embeddings ``rows`` ``[n, hidden]``, of any dtype, at ``positions``, in the place of tokens.
    For the request's begin, after `Writers.forget`. Reads the host's memory only: see `embedding_numbers`."""
    numbers = embedding_numbers(rows)
    at = torch.as_tensor(list(positions) if isinstance(positions, range) else positions, dtype=torch.int64)
    # One span for each run of positions, so that findings say where the content begins and ends.
    ends = ((at[1:] - at[:-1] != 1).nonzero()[:, 0] + 1).tolist()
    for low, high in zip([0, *ends], [*ends, len(at)], strict=True):
        if low < high:
            part = numbers[low:high]
            writers.contents.put(request, int(at[low]), part, f"embeddings #{_short(part)}")


def put_media(writers: Writers, request: str, begin: int, count: int, about: tuple[str, str | None]) -> None:
    """At ``count`` positions from ``begin`` on, the request has an image, audio or other media in the place of tokens.
    ``about``: a word such as ``image``, and the engine's own hash, None for none."""
    what, key = about
    number = UNTOLD if key is None else media_number(key)
    numbers = torch.tensor([number], dtype=torch.int32, device="cpu").expand(count)
    writers.contents.put(request, begin, numbers, what if key is None else f"{what} #{_short(numbers[:1])}")


def embedding_numbers(rows: Tensor) -> Tensor:
    """A number for each of the embeddings ``rows`` ``[n, hidden]``, int32 ``[n]`` on the host, of at least
    `FIRST_CONTENT`: the same for the same bits in `SAMPLED_WORDS`. `UNTOLD` beyond `MOST_EMBEDDINGS`, and for rows on
    a device, since the host would wait."""
    numbers = torch.full((len(rows),), UNTOLD, dtype=torch.int32, device="cpu")
    if rows.device.type == "cpu" and rows.dim() == 2 and rows.numel():
        numbers[:MOST_EMBEDDINGS] = content_numbers(rows[:MOST_EMBEDDINGS])
    return numbers


def content_numbers(rows: Tensor) -> Tensor:
    """As `embedding_numbers`, of all ``rows`` ``[n, hidden]``, not empty: int64 ``[n]`` on the same device. Waits for
    nothing."""
    with torch.no_grad():
        some = rows.detach().contiguous()
        word = torch.int64 if some.shape[1] * some.element_size() % 8 == 0 else torch.uint8
        words = some.view(word)
        words = words[:, :: -(-words.shape[1] // SAMPLED_WORDS)]
        digests = splitmix((words * keys(words.shape[1], words.device)).sum(1))
        return FIRST_CONTENT + 1 + digests.remainder(FIRST_CONTENT - 1)


def media_number(key: str) -> int:
    """The number of media by the engine's own hash: never `UNTOLD`."""
    digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    return FIRST_CONTENT + 1 + int.from_bytes(digest, "little") % (FIRST_CONTENT - 1)


def _short(numbers: Tensor) -> str:
    """A name of content by its numbers: equal numbers, equal name."""
    return blake2b(numbers.contiguous().numpy().tobytes(), digest_size=4).hexdigest()
