"""DeepSeek-V4 on a CPU: all of SGLang but the forward."""

from typing import Any

import torch

from engines import fake_compressors


def install() -> None:
    """DeepSeek-V4's forward needs a GPU; its pools, allocator, prefix cache and scheduler don't. So the forward is
    replaced, below `ModelRunner.forward`, by one that writes bytes that depend on token and position to where the real
    one does: the window's page, and the compressed pages and the indexer's wherever a group is complete."""
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    def write(buffers: list[Any], slots: Any, content: Any, strips: tuple[int, int, int]) -> None:
        page_size, data, scale = strips
        page, inside = (slots // page_size)[:, None], (slots % page_size)[:, None]
        for layer, buffer in enumerate(buffers):
            # From the middle of the product, where every bit of the content has its say.
            row = ((content[:, None] * 8 + layer) * (2 * torch.arange(data) + 1) * 0x1E3779B97F4A7C15 >> 40) & 255
            row = row.to(torch.uint8)
            buffer[page, inside * data + torch.arange(data)] = row
            buffer[page, page_size * data + inside * scale + torch.arange(scale)] = row[:, :scale]

    def compute(model: Any, runner: Any, batch: Any) -> Any:
        pool, slots = runner.token_to_kv_pool, batch.out_cache_loc.long()
        vocabulary = runner.model_config.vocab_size
        content = batch.input_ids.long() + vocabulary * batch.positions.long()
        write(pool.swa_kv_pool.kv_buffer, pool.translate_loc_from_full_to_swa(slots), content, (256, 576, 8))
        for ratio, page_size, sub in ((4, 64, pool.c4_kv_pool), (128, 2, pool.c128_kv_pool)):
            whole = (slots + 1) % ratio == 0
            write(sub.kv_buffer, slots[whole] // ratio, content[whole], (page_size, 576, 8))
            if ratio == 4:
                index = pool.c4_indexer_kv_pool.index_k_with_scale_buffer
                write(index, slots[whole] // ratio, content[whole], (page_size, 128, 4))
        fake_compressors.run(runner, batch)
        rows = torch.arange(batch.batch_size)
        last = batch.extend_seq_lens.cumsum(0) - 1 if batch.forward_mode.is_extend() else rows
        logits = torch.zeros(batch.batch_size, vocabulary)
        logits[rows, (batch.input_ids[last.long()].long() * 5 + 3) % vocabulary] = 1
        return LogitsProcessorOutput(next_token_logits=logits)

    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Through the model, since SGLang's own canary stands around that.
        return ModelRunnerOutput(logits_output=self.model.forward(self, batch), can_run_graph=False)

    ModelRunner._forward_raw = forward
    DeepseekV4ForCausalLM.forward = compute
