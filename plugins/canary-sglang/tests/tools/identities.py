"""Requests that are alike but for what their KV depends on beside the tokens, and a prefix cache that forgets it."""

from typing import Any


def serve_in_turn(
    engine: Any, prompt: list[int], identities: list[dict[str, str]], new_tokens: int = 4
) -> dict[str, Any]:
    """Serves the prompt once for each of the identities, fields of SGLang's message, one after the other; gives the
    names, how many tokens each found in the prefix cache, and the prefix hash that is recorded for its first token."""
    from canary_sglang.compat.schedulers import table_row

    names, cached, hashes = [], [], []
    for identity in identities:
        request = engine.submit(prompt, new_tokens, **identity)
        while not request.output_ids:
            engine.step()
        engine.session.canary.slots.settle()
        row, _ = table_row(engine.scheduler, request)
        names.append(request.rid)
        hashes.append(engine.states["full"].records[int(row[0]), 2:4].tolist())
        while not request.finished():
            engine.step()
        cached.append(int(request.cached_tokens))
    while engine.step():
        pass
    return {"names": names, "cached": cached, "hashes": hashes}


def forget_in_keys(engine: Any, field: str) -> None:
    """From now on the keys of the prefix cache lack ``field``, as where a new sort of request was not thought of."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    original = RadixKey.__init__

    def make(key: Any, *args: Any, **kwargs: Any) -> None:
        original(key, *args, **kwargs)
        setattr(key, field, None)

    RadixKey.__init__ = make
