"""Requests in the views, against the requests themselves."""

from canary_kit.conformance.onlooker import SeenRow
from canary_kit.conformance.problems import Nonconforming
from canary_kit.conformance.stage import Stage


def require_truth(stage: Stage, reuses: bool) -> None:
    """Every row of every view must have its request's name, its tokens at their positions, and its own list of tokens;
    every position of every request must be computed. ``reuses``: by it, or by a request with the same tokens up to
    there. Raises `Nonconforming`."""
    own = {n: (*ask.tokens, *stage.session.answer(n)) for n, ask in stage.asks.items()}
    computed: dict[str, set[int]] = {name: set() for name in own}
    known = 0
    for row in stage.onlooker.rows:
        name = _name(row, own)
        tokens = own[name]
        end = row.prefix + len(row.tokens)
        if row.prefix < 0 or tokens[row.prefix : end] != row.tokens:
            raise Nonconforming("BatchAdapter", _shifted(row, name, tokens))
        for position, token in enumerate(row.expected[: len(tokens)]):
            if token >= 0 and token != tokens[position]:
                raise Nonconforming(
                    "BatchAdapter",
                    f"expected_tokens says that {name} has token {token} at position {position}, its own is "
                    f"{tokens[position]}: they must be the request's own list, prompt and answer",
                )
        known += sum(token >= 0 for token in row.expected[row.prefix : end])
        computed[name].update(range(row.prefix, end))
    done = {own[name][: p + 1] for name, positions in computed.items() for p in positions} if reuses else set()
    for name, positions in computed.items():
        # Nothing computes the KV of the last token.
        missing = sorted(set(range(len(own[name]) - 1)) - positions)
        # A preempted request may hit what others have computed meanwhile, so not only at its beginning.
        missing = [p for p in missing if own[name][: p + 1] not in done]
        if missing or not (positions or reuses):
            unseen = not stage.unchecked and stage.onlooker.forwards < stage.steps
            raise Nonconforming(
                "hooks" if unseen else "BatchAdapter",
                f"no view told that positions {_ranges(missing)} of {name} are computed: is the view None for some "
                "forwards, are new_lens too short, or do some forwards run past the hook?",
            )
    if not known:
        raise Nonconforming(
            "BatchAdapter",
            "expected_tokens is None or unknown for every new token: without the requests' own tokens a token that the "
            "batch got wrong is not found",
        )


def _name(row: SeenRow, own: dict[str, tuple[int, ...]]) -> str:
    told = row.request
    # The longest first: one name may begin another.
    names = sorted((n for n in own if told is not None and n in told), key=len, reverse=True)
    if not names:
        raise Nonconforming(
            "BatchAdapter",
            f"a row with {len(row.tokens)} new tokens from position {row.prefix} on belongs to {told or 'nobody'}: "
            "writers must be canary.writers.id(name) of the requests, in the rows' order, and padding must have no "
            "new tokens",
        )
    return names[0]


def _shifted(row: SeenRow, name: str, tokens: tuple[int, ...]) -> str:
    length = len(row.tokens)
    what = f"a view says that {name} computes {length} token(s) from position {row.prefix} on"
    places = [p for p in range(len(tokens)) if tokens[p : p + length] == row.tokens]
    if places:
        near = min(places, key=lambda p: abs(p - row.prefix))
        return f"{what}, but its own tokens there are those from position {near} on: check prefix_lens"
    return (
        f"{what}, and these are not its tokens there: check new_lens, the order of token_ids, and padding between rows"
    )


def _ranges(positions: list[int]) -> str:
    return f"{positions[0]} to {positions[-1]} ({len(positions)} of them)" if positions else "of the prompt"
