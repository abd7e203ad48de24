"""SGLang with a model that answers as `TokenOracle` says."""

from typing import Any

from canary_core.testing import TokenOracle
from tools import traffic


def ask(engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Serves ``prompts`` with the oracle between the model and the sampler; gives the right outputs beside what
    `traffic.serve` does. The engine stays so."""
    oracle = _of(engine)
    served = traffic.serve(engine, prompts, new_tokens)
    return {**served, "right": [oracle.answer(prompt, new_tokens) for prompt in prompts]}


def _of(engine: Any) -> TokenOracle:
    runner = engine.runner
    known = getattr(engine, "oracle", None)
    if known is not None:
        oracle: TokenOracle = known
        return oracle
    oracle = engine.oracle = TokenOracle(
        runner.token_to_kv_pool.size + runner.page_size, int(runner.model_config.vocab_size)
    )

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        # What is stored, and through which slots it is read, as of this forward: its tables may change after it.
        slots, tokens = batch.out_cache_loc.clone(), batch.input_ids.clone()
        table = runner.req_to_token_pool.req_to_token
        rows = [table[row, :length].clone() for row, length in _rows(batch)]
        given = type(runner).forward(runner, batch, *args, **kwargs)
        oracle.store(slots, tokens)
        sequences = [oracle.read(row) for row in rows]
        if batch.forward_mode.is_target_verify():
            drafted = tokens.view(len(rows), -1)
            sequences = [
                [*sequence.tolist(), *chain[: i + 1].tolist()]
                for sequence, chain in zip(sequences, drafted, strict=True)
                for i in range(drafted.shape[1])
            ]
        oracle.speak(given.logits_output.next_token_logits, sequences)
        return given

    runner.forward = forward
    return oracle


def _rows(batch: Any) -> list[tuple[int, int]]:
    """Each request's row of the table, and how many tokens its sequence has in it."""
    return list(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True))


def wrong_answers(engine: Any) -> list[str]:
    """Names of the requests, of those since `ask`, whose answers so far are not what the oracle says."""
    oracle = _of(engine)
    return [
        request.rid
        for request in engine.requests
        if oracle.answer(request.origin_input_ids, len(request.output_ids)) != list(request.output_ids)
    ]
