"""Guards a real vLLM with random weights and shows it: clean traffic finds nothing, every bit that is flipped from
outside is found with layer and half, so is every fault of `CANARY_FAULTS` as what it is, and the tokens are those of an
engine without Canary.

    python3 guard.py small graphs window hybrid mla fp8 ngram offload     # FEATUREs; 8b, lmcache and chunks, too
    python3 guard.py eagle draft mamba gdn conv piecewise int8            # drafts, states, torch.compile, scales
    CANARY_STORE_CHECK=true python3 guard.py small piecewise mla ngram    # any setting of Canary's, for all of them
    CANARY_RECOMPUTE=100% python3 guard.py hybrid mla --clean             # clean traffic alone, and second computations
    python3 guard.py tp2 pp2 dp2 hybrid-tp2 mla-tp2 ngram-tp2             # two GPUs
    python3 guard.py small ngram hybrid --device cpu                      # a check that the script runs; all but pp2
                                                                          # and dp2, which vLLM does not run there

Each feature is two engines one after the other, each in a process of its own: a guarded one, and one without Canary
that serves the same prompts. ``GUARD_POOL_GIB`` (8) is the size of its pool on a GPU, ``GUARD_POKES`` (12) how many
bits are flipped. Some 10 s an engine on a machine that has run one before, 45 s for the first.
With ``--clean`` nothing is broken, the traffic comes ``GUARD_ROUNDS`` (2) times, and there is no engine without Canary:
where a second computation is in a batch, other tokens may be as likely.
Prints a table at the end; raw results go to ``$OUT/guard-FEATURE.json``. Exits with 1 if anything is not as it should.
"""

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = Path(os.environ.get("OUT", "/tmp/canary-guard"))
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "CANARY_LOG_FORMAT": "json",
}
LMCACHE = {
    "LMCACHE_CHUNK_SIZE": "256",
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "4.0",
    "LMCACHE_TRACK_USAGE": "false",
}
GRAPHS = dict(
    compilation_config={
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64]
    }
)  # fmt: skip
EAGER = dict(enforce_eager=True)
PIECEWISE = dict(
    compilation_config={"mode": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64]}
)
TENSOR_PARALLEL = dict(tensor_parallel_size=2)
# States whose prefixes are cached are not guarded.
UNCACHED = dict(enable_prefix_caching=False)


def drafted(method: str, model: str) -> dict[str, Any]:
    """``model``: one of `MODELS`."""
    config = {"method": method, "model": model, "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    return dict(GRAPHS, speculative_config=config)


OFFLOAD = dict(
    kv_transfer_config={
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_cpu_blocks": 4096, "cpu_bytes_to_use": 2 << 30},
    },
    enable_prefix_caching=False,
)
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("llama", EAGER),
    "graphs": ("llama", GRAPHS),
    "compile": ("llama", {}),
    "8b": ("8b", GRAPHS),
    "window": ("mistral", GRAPHS),
    "hybrid": ("gemma3", GRAPHS),
    "chunks": ("llama4", GRAPHS),
    "mla": ("deepseek", GRAPHS),
    "fp8": ("llama", dict(GRAPHS, kv_cache_dtype="fp8")),
    "int8": ("llama", dict(GRAPHS, kv_cache_dtype="int8_per_token_head")),
    "ngram": (
        "llama",
        dict(
            GRAPHS,
            speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        ),
    ),
    "chunked": ("llama", dict(GRAPHS, max_num_batched_tokens=128, max_num_seqs=16)),
    # A little more than the longest request may take, and half of what the traffic would.
    "preempt": ("llama", dict(GRAPHS, num_gpu_blocks_override=520)),
    "offload": ("llama", dict(EAGER, **OFFLOAD)),
    "lmcache": (
        "llama",
        dict(
            EAGER,
            kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
            enable_prefix_caching=False,
        ),
    ),
    "eagle": ("llama", drafted("eagle", "eagle")),
    "draft": ("llama", drafted("draft_model", "llama")),
    "mamba": ("falcon_h1", dict(GRAPHS, **UNCACHED)),
    "conv": ("lfm2", dict(GRAPHS, **UNCACHED)),
    "cached": ("lfm2", dict(GRAPHS, enable_prefix_caching=True)),
    # FlashInfer's kernel, which vLLM takes on this GPU, is not among what is packed.
    "gdn": ("qwen3_next", dict(GRAPHS, **UNCACHED, additional_config={"gdn_prefill_backend": "triton"})),
    "piecewise": ("llama", PIECEWISE),
    "tp2": ("llama", GRAPHS | TENSOR_PARALLEL),
    "pp2": ("llama", dict(GRAPHS, pipeline_parallel_size=2)),
    # vLLM's offline engines take data parallelism for mixtures of experts only: one process for each rank.
    "dp2": ("mixtral", GRAPHS),
}
for name in ("window", "hybrid", "mla", "fp8", "ngram", "eagle", "conv"):
    FEATURES[f"{name}-tp2"] = FEATURES[name][0], FEATURES[name][1] | TENSOR_PARALLEL
"""Feature: the model, and what `vllm.LLM` is given."""
RANKS = {"dp2": 2}
"""Processes of an engine, where it is several."""

COMMON = dict(
    max_position_embeddings=16384, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, vocab_size=32000, initializer_range=0.05,
)  # fmt: skip
SIZES = dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
    head_dim=64,
)  # fmt: skip
TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=512, initializer_range=0.3,
)  # fmt: skip
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu")
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "8b": dict(
        LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128,
        vocab_size=128256,
    ),
    "mistral": dict(LLAMA, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=512),
    "gemma3": dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=64, sliding_window=512, rope_local_base_freq=10000.0,
    ),
    # Chunked local attention in three of four layers, and no experts.
    "llama4": dict(
        architectures=["Llama4ForCausalLM"], model_type="llama4_text", hidden_act="silu", attention_chunk_size=2048,
        intermediate_size_mlp=3072, num_local_experts=2, num_experts_per_tok=1, interleave_moe_layer_step=0,
        moe_layers=[], use_qk_norm=True, attn_temperature_tuning=False,
    ),
    "eagle": dict(LLAMA, num_hidden_layers=1),
    "mixtral": dict(
        architectures=["MixtralForCausalLM"], model_type="mixtral", hidden_act="silu", num_local_experts=4,
        num_experts_per_tok=2, sliding_window=None,
    ),
    "falcon_h1": dict(
        architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", hidden_act="silu", mamba_n_heads=32,
        mamba_d_head=64, mamba_d_ssm=2048, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
        mamba_chunk_size=256,
    ),
    "lfm2": dict(
        architectures=["Lfm2ForCausalLM"], model_type="lfm2", conv_L_cache=3, conv_bias=False, norm_eps=1e-5,
        block_multiple_of=32, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False,
    ),
    "qwen3_next": dict(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", hidden_act="silu", head_dim=128,
        num_attention_heads=8, num_key_value_heads=2, linear_num_key_heads=8, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=512,
        shared_expert_intermediate_size=512, partial_rotary_factor=0.5, full_attention_interval=4,
    ),
    "deepseek": dict(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_act="silu", kv_lora_rank=512,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=512, first_k_dense_replace=8,
        topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, scoring_func="softmax",
        norm_topk_prob=False, moe_layer_freq=1, num_key_value_heads=16, head_dim=None,
    ),
}  # fmt: skip
POKES = int(os.environ.get("GUARD_POKES", "12"))
ROUNDS = int(os.environ.get("GUARD_ROUNDS", "2"))
POOL_GIB = int(os.environ.get("GUARD_POOL_GIB", "8"))
DEVICE = os.environ.get("GUARD_DEVICE", "cuda")


def model_folder(name: str) -> str:
    """A folder with the model's config.json; weights are made up by vLLM."""
    tiny = DEVICE == "cpu"
    config = {**COMMON, "torch_dtype": "float32" if tiny else "bfloat16", **SIZES, **MODELS[name]}
    if tiny:
        config |= TINY | ({"sliding_window": 32} if "sliding_window" in config else {})
        if name == "deepseek":
            config |= dict(num_key_value_heads=4, first_k_dense_replace=4, head_dim=None, torch_dtype="bfloat16")
        if name == "llama4":
            config |= dict(attention_chunk_size=192, intermediate_size_mlp=128)
        if name == "falcon_h1":
            config |= dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_ssm=128, mamba_d_state=16)
        if name == "qwen3_next":
            config |= dict(linear_num_key_heads=2, linear_num_value_heads=4, torch_dtype="bfloat16")
    config |= {"num_hidden_layers": MODELS[name]["num_hidden_layers"]} if "num_hidden_layers" in MODELS[name] else {}
    if tiny and name == "8b":
        config["num_hidden_layers"] = TINY["num_hidden_layers"]
    if name == "lfm2":
        size, inner = config["hidden_size"], config["intermediate_size"]
        config |= dict(head_dim=None, num_attention_heads=size // 32, num_key_value_heads=size // 64)
        config |= dict(block_dim=size, conv_dim=size, block_ff_dim=inner)
    kinds = {
        "gemma3": ["sliding_attention"] * 3 + ["full_attention"],
        "llama4": ["chunked_attention"] * 3 + ["full_attention"],
        "lfm2": ["conv", "full_attention"] * 2,
        "qwen3_next": ["linear_attention"] * 3 + ["full_attention"],
    }.get(name)
    if kinds:
        config["layer_types"] = [kinds[i % 4] for i in range(config["num_hidden_layers"])]
        config["no_rope_layers"] = [int(kind != "full_attention") for kind in config["layer_types"]]
    folder = OUT / f"model-{name}-{DEVICE}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(folder)


def own_weights(worker: Any) -> None:
    """In a worker: gives each matrix weights of its own. vLLM's made-up ones are the same in all layers, and so would
    be the KV; then nobody could say in which layer a byte is wrong. A draft model gets nearly those of the served one,
    so that some of what it drafts is accepted."""
    import zlib

    import torch

    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    seen = set()
    for model, noise in ((runner.model, 0.0), (getattr(drafter, "model", None), 0.002)):
        for name, parameter in model.named_parameters() if hasattr(model, "named_parameters") else ():
            if parameter.dim() > 1 and parameter.is_floating_point() and parameter.data_ptr() not in seen:
                # A drafter may have the served model's own embedding.
                seen.add(parameter.data_ptr())
                maker = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
                with torch.no_grad():
                    parameter.normal_(0.0, 0.02, generator=maker)
                    if noise:
                        parameter.add_(torch.empty_like(parameter).normal_(0.0, noise, generator=maker))


def places(worker: Any) -> list[tuple[str, str, bool]]:
    """In a worker: the names of its layers that keep something, each with the halves that it has, and whether it is a
    draft model's."""
    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    drafts: set[str] = set()
    for attribute in ("draft_attn_layer_names", "_draft_attn_layer_names"):
        drafts |= set(getattr(drafter, attribute, None) or ())
    found = []
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            kept = runner.compilation_config.static_forward_context[name].kv_cache
            halves = ("kv",) if hasattr(runner.model_config.hf_config, "kv_lora_rank") else ("k", "v")
            if "Mamba" in type(group.kv_cache_spec).__name__:
                halves = ("conv", "ssm")[: len(kept)]
            found += [(name, half, name in drafts) for half in halves]
    return sorted(found)


def layer_number(name: str) -> int:
    """As vLLM counts."""
    return int(re.findall(r"\.(\d+)\.", name)[0])


def poke(worker: Any, layer: str, half: str, block: tuple[int, ...], offset: int, seed: int) -> bool:
    """In a worker: flips one bit of the KV of a token, or of a request's state, by vLLM's own layout of the cache.
    ``layer``: its name; False if it is another worker's. ``block``: of each group, the scheduler's block in which the
    token is."""
    import torch

    runner, rng = worker.model_runner, random.Random(seed)
    groups = runner.kv_cache_config.kv_cache_groups
    number = next((i for i, group in enumerate(groups) if layer in group.layer_names), None)
    if number is None:
        return False
    size = groups[number].kv_cache_spec.block_size
    slot = block[number] * size + offset % size
    cache = runner.compilation_config.static_forward_context[layer].kv_cache
    if half in ("conv", "ssm"):
        state = cache[("conv", "ssm").index(half)][block[number]]
        bits = state.view({2: torch.int16, 4: torch.int32}[state.element_size()])
        bits[tuple(rng.randrange(n) for n in bits.shape)] ^= 1 << rng.randrange(6)
        return True
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
    view = cache.view(bits)
    if half == "kv":
        view = view.reshape(view.shape[0], -1, view.shape[-1]) if view.dim() == 4 else view
        page = view.shape[1]
        row = view[slot // page, slot % page]
    else:
        heads, page, size = view.shape[1], view.shape[2], view.shape[3] // 2
        head = rng.randrange(heads)
        if cache.device.type == "cpu":
            both = view.view(view.shape[0], heads, 2, page * size)[slot // page, head]
            row = both[0].view(size, page)[:, slot % page] if half == "k" else both[1].view(page, size)[slot % page]
        else:
            row = view[slot // page, head, slot % page, size * (half == "v") :][:size]
    place = rng.randrange(len(row))
    row[place] ^= 1 << rng.randrange(6)
    return True


def told(worker: Any) -> dict[str, Any]:
    """In a worker: all that Canary has told so far, and its counters."""
    import guard_witness
    import torch
    from canary_vllm.hooks import HOOKS

    stats = {}
    with torch.inference_mode():
        for session in HOOKS.sessions:
            session.canary.drain()
            stats = session.canary.stats()
    return {"violations": list(guard_witness.VIOLATIONS), "events": list(guard_witness.EVENTS), "stats": stats}


def inject(worker: Any, fault: str, seed: int) -> None:
    """In a worker: the next forwards meet this fault once, of those that `CANARY_FAULTS` knows."""
    import guard_witness

    from canary_core import plugins
    from canary_kit.faults.injector import FaultInjector

    guard_witness.OBJECTS.clear()
    guard_witness.INJECTORS.append(FaultInjector.parse(fault, seed))
    plugins.hook_manager().register(guard_witness.INJECTORS[-1])


def explained(worker: Any) -> list[dict[str, Any]]:
    """In a worker: what was injected since, and whether a finding names it as what it is."""
    import guard_witness

    from canary_core import plugins

    told(worker)
    injector = guard_witness.INJECTORS.pop()
    plugins.hook_manager().unregister(injector)
    return [
        {"source": one.source, "region": one.region, "step": one.step,
         "found": any(one.explains(violation) for violation in guard_witness.OBJECTS)}
        for one in injector.injections
    ]  # fmt: skip


class Served:
    """A running engine."""

    def __init__(self, feature: str) -> None:
        from vllm import LLM

        name, options = FEATURES[feature]
        options = dict(options)
        if "model" in options.get("speculative_config", {}):
            config = options["speculative_config"]
            options["speculative_config"] = {**config, "model": model_folder(config["model"])}
        own = dict(
            gpu_memory_utilization=0.5 if name == "8b" else 0.2, max_model_len=8192, max_num_seqs=64, dtype="bfloat16"
        )
        if name != "8b":
            # A pool of a fixed size: then several features fit one GPU side by side.
            own["kv_cache_memory_bytes"] = POOL_GIB << 30
        self.scale = 1
        if DEVICE == "cpu":
            options.pop("compilation_config", None)
            own = dict(dtype="float32", max_model_len=256, max_num_seqs=8, block_size=32, enforce_eager=True)
            own |= dict(num_gpu_blocks_override=60)
            if name in ("deepseek", "qwen3_next"):
                # AMX's MLA kernels take no float32, and neither do those of gated delta nets.
                own["dtype"] = "bfloat16"
            if "num_gpu_blocks_override" in options:
                options["num_gpu_blocks_override"] = 14
            self.scale = 16
        made = {**dict(load_format="dummy", skip_tokenizer_init=True, seed=1), **own, **options}
        self.llm = LLM(model=model_folder(name), **made)
        self.llm.collective_rpc(own_weights)
        self.vocabulary = 500 if DEVICE == "cpu" else 30000
        every = {place for one in self.llm.collective_rpc(places) for place in one}
        if DEVICE == "cpu" and name == "qwen3_next":
            # bfloat16 KV lies in AMX's tiles there, which nobody guards.
            every = {place for place in every if place[1] in ("conv", "ssm")}
        self.places = sorted(every)
        self.window = 32 if DEVICE == "cpu" else 512

    def prompts(self, seed: int, count: int, length: int, shared: int = 0) -> list[list[int]]:
        """Random tokens; the first ``shared`` are the same in all of them."""
        rng = random.Random(seed)
        length, shared = max(length // self.scale, 4), shared // self.scale
        head = [rng.randrange(10, self.vocabulary) for _ in range(shared)]
        return [
            head + [rng.randrange(10, self.vocabulary) for _ in range(length - shared + rng.randrange(4))]
            for _ in range(count)
        ]

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Greedy tokens."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max(new // self.scale, 8), temperature=0, ignore_eos=True, detokenize=False)
        out = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in out]

    def traffic(self) -> list[list[int]]:
        """What both engines serve: batches that mix, repeat, share prefixes, and one long prompt."""
        answers = []
        for seed in range(3 if self.scale == 1 else 1):
            mixed = [p for i in range(4) for p in self.prompts(10 * seed + i, 4, 100 + 300 * i)]
            answers += self.generate(mixed, 128)
        shared = self.prompts(77, 12, 900, shared=640)
        answers += self.generate(shared, 64)
        answers += self.generate(shared, 64)
        answers += self.generate(self.prompts(78, 1, 4000), 16)
        answers += self.generate(self.prompts(79, 40 if self.scale == 1 else 8, 200), 200)
        return answers

    def pokes(self) -> list[dict[str, Any]]:
        """Flips bits under running requests, and tells where; each is found or not."""
        from vllm import SamplingParams

        engine, rng = self.llm.llm_engine, random.Random(5)
        scheduler = engine.engine_core.engine_core.scheduler
        done = []
        for number in range(POKES):
            params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, detokenize=False)
            prompts = self.prompts(500 + number, 4, 700)
            for i, prompt in enumerate(prompts):
                engine.add_request(f"poked-{number}-{i}", {"prompt_token_ids": prompt}, params)
            while any(len(r.output_token_ids) < 4 for r in scheduler.requests.values()):
                engine.step()
            request = rng.choice(list(scheduler.requests.values()))
            # A convolution's state, of which there are few bytes, as often as all else.
            half = rng.choice(sorted({half for _, half, _ in self.places}))
            layer, _, drafts = rng.choice([place for place in self.places if place[1] == half])
            # Within the window, and computed whatever was drafted.
            length = request.num_prompt_tokens
            position = rng.randrange(max(0, length - self.window + 60 // self.scale + 12), length)
            groups = scheduler.kv_cache_config.kv_cache_groups
            held = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            specs = [g.kv_cache_spec for g in groups]
            block = tuple(
                # A state lies in the last block.
                ids[-1 if "Mamba" in type(spec).__name__ else position // spec.block_size]
                for ids, spec in zip(held, specs, strict=True)
            )
            before = [len(one["violations"]) for one in self.llm.collective_rpc(told)]
            poked = sum(self.llm.collective_rpc(poke, args=(layer, half, block, position, number)))
            while engine.has_unfinished_requests():
                engine.step()
            after = self.llm.collective_rpc(told)
            new = [v for one, n in zip(after, before, strict=True) for v in one["violations"][n:]]
            states = half in ("conv", "ssm")
            right = [
                v
                for v in new
                if (v["kind"], v.get("layer"), v.get("half")) == ("bytes", layer_number(layer), half)
                and (states or v.get("position", v.get("stored_position")) == position)
                and v["region"].startswith("draft") == drafts
                and request.request_id in str(v.get("stored_request"))
            ]
            ranks = len({v["rank"] for v in right})
            wrong = [v for v in new if v not in right]
            done.append(
                {"layer": layer, "half": half, "position": position, "request": request.request_id,
                 "found": ranks == poked, "others": wrong, "said": right[0]["explanation"] if right else None}
            )  # fmt: skip
            self.llm.reset_prefix_cache()
        return done

    def faults(self) -> dict[str, list[dict[str, Any]]]:
        """Each fault of `CANARY_FAULTS`, once in each worker, while requests share prefixes and decode. Where only
        states are guarded, some find nothing to break, and without a prefix cache no slot is kept unused: those are
        left out."""
        from canary_kit.faults.catalogue import FAULTS

        done, has_kv = {}, bool({half for _, half, _ in self.places} - {"conv", "ssm"})
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        # Several blocks each, of which one is written: those of a model with states have hundreds of tokens.
        blocks = [spec.block_size for spec in specs if "Mamba" not in type(spec).__name__]
        length = min(max(500, 3 * max(blocks, default=0)), 4000) if self.scale == 1 else 500
        for number, fault in enumerate(FAULTS):
            self.generate(self.prompts(900 + number, 4, length, shared=320), 16)
            self.llm.collective_rpc(inject, args=(fault, number))
            self.generate(self.prompts(900 + number, 8, length, shared=320), 32)
            met = [one for worker in self.llm.collective_rpc(explained) for one in worker]
            has_place = has_kv and (scheduler.kv_cache_manager.enable_caching or fault != "real_kv_unused_cache")
            if met or has_place:
                done[fault] = met
            self.llm.reset_prefix_cache()
        return done


def child(feature: str, how: str) -> None:
    """One engine in this process, ``guarded``, ``plain`` or ``clean``: its results as a file."""
    began = time.time()
    served = Served(feature)
    result: dict[str, Any] = {"start_s": round(time.time() - began, 1)}
    began = time.time()
    result["answers"] = served.traffic()
    result["traffic_s"] = round(time.time() - began, 1)
    if feature in ("offload", "lmcache"):
        # What was served comes back from the host; with LMCache 0.5.2 it comes back wrong.
        time.sleep(2)
        result["again"] = served.traffic()
    if how == "clean":
        for _ in range(ROUNDS - 1):
            served.traffic()
    if how != "plain":
        result["clean"] = served.llm.collective_rpc(told)
    if how == "guarded":
        result["pokes"] = served.pokes()
        result["faults"] = served.faults()
        result["end"] = [one["stats"] for one in served.llm.collective_rpc(told)]
    rank = os.environ.get("VLLM_DP_RANK", "")
    (OUT / f"{feature}-{how}{rank}.json").write_text(json.dumps(result))
    print("DONE", flush=True)
    # LMCache's threads keep the process alive.
    os._exit(0)


def entry_point_folder() -> Path:
    """Makes `guard_witness` known as a plugin, and canary-vllm where it is not installed."""
    folder = OUT / "entry"
    info = folder / "guard_witness-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: guard_witness\nVersion: 0\n")
    lines = "[canary]\nguard_witness = guard_witness\n"
    if not entry_points(group="canary", name="vllm"):
        lines += "vllm = canary_vllm.plugin\n[vllm.general_plugins]\ncanary = canary_vllm.plugin:start\n"
    info.joinpath("entry_points.txt").write_text(lines)
    return folder


def run(feature: str, how: str, limit_s: int) -> dict[str, Any]:
    """One engine in a process of its own: ``guarded``, ``plain`` or ``clean``."""
    guarded = how != "plain"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_")} | ENVIRONMENT
    environment |= LMCACHE if feature == "lmcache" else {}
    path = [str(entry_point_folder()), str(HERE), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "GUARD_DEVICE": DEVICE, "OUT": str(OUT)}
    if DEVICE == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if feature.endswith(("tp2", "pp2", "dp2")) else "all"
    if guarded:
        environment |= {"CANARY_PLUGINS": "vllm,guard_witness", "CANARY_READ_CHECK": "-1", "CANARY_AUDIT": "6"}
        # So that a pool of 8 GB is read once within the few forwards that follow a fault.
        environment["CANARY_SCRUB_BUDGET"] = "512MiB"
        given = {k: v for k, v in os.environ.items() if k.startswith("CANARY_")}
        environment = {**environment, **given, "CANARY_PLUGINS": environment["CANARY_PLUGINS"]}
    if feature.removesuffix("-tp2") in ("mamba", "conv", "gdn", "cached"):
        # Else a decode's state is compared every 256th step.
        environment.setdefault("CANARY_STATE_INTERVAL", "1")
    ranks = RANKS.get(feature, 1)
    names = [f"{feature}-{how}{rank if ranks > 1 else ''}" for rank in range(ranks)]
    arguments = [sys.executable, __file__, feature, "--child", how]
    running = []
    for rank, name in enumerate(names):
        (OUT / f"{name}.json").unlink(missing_ok=True)
        own = {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(ranks)}
        own |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": "29571" if guarded else "29631"}
        log = (OUT / f"{name}.log").open("w")
        more = environment | (own if ranks > 1 else {})
        running.append(subprocess.Popen(arguments, stdout=log, stderr=log, env=more))
    ends = time.time() + limit_s
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(1, ends - time.time()))
        process.kill()
    results: list[dict[str, Any]] = []
    for name in names:
        try:
            results.append(json.loads((OUT / f"{name}.json").read_text()))
        except FileNotFoundError:
            return {"failed": (OUT / f"{name}.log").read_text(errors="replace")[-3000:]}
    first, *others = results
    for key, value in first.items():
        if isinstance(value, list):
            value += [item for other in others for item in other[key]]
    return first


def _expected(feature: str, event: dict[str, Any]) -> bool:
    """Whether the event tells of something left out by design."""
    # bfloat16 KV lies in AMX's tiles there.
    tiles = feature == "gdn" and DEVICE == "cpu" and event["event"] == "coverage"
    # Of the first second computations, with ``CANARY_RECOMPUTE``.
    unjudged = event["event"] == "unjudged" and "noise of this engine is not known yet" in event["reason"]
    return unjudged or (tiles and "its layout is not known" in event["summary"])


COUNTS = {
    "recomputed": "recomputed_requests", "same": "recompute_same", "differs": "recompute_differs",
    "unjudged": "recompute_unjudged", "left_out": "recompute_left_out", "looks": "attention_looks",
}  # fmt: skip


def clean_row(feature: str, served: dict[str, Any]) -> dict[str, Any]:
    """One row of the table of ``--clean``, by rank."""
    if "failed" in served:
        print(served["failed"], flush=True)
        return {"feature": feature, "ok": False}
    clean = served["clean"]
    false = [violation for one in clean for violation in one["violations"]]
    counted = {name: [one["stats"].get(counter, 0) for one in clean] for name, counter in COUNTS.items()}
    forwards = [one["stats"].get("forwards") for one in clean]
    row = {"feature": feature, "ok": not false, "forwards": forwards, "false": len(false), **counted}
    return {**row, "first_false": false[:3]}


def judge(feature: str, guarded: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    for one in (guarded, plain):
        if "failed" in one:
            print(one["failed"], flush=True)
            return {"feature": feature, "ok": False, "failed": "an engine did not come to its end; see above"}
    clean = guarded["clean"]
    false = [v for one in clean for v in one["violations"]]
    bad = [
        e
        for one in clean
        for e in one["events"]
        if e["level"] in ("error", "warning") and e["event"] != "violation" and not _expected(feature, e)
    ]
    audits = [e for one in clean for e in one["events"] if e["event"].startswith("audit")]
    coverage = [e for one in clean for e in one["events"] if e["event"] == "coverage"]
    found = sum(p["found"] for p in guarded["pokes"])
    others = [v for p in guarded["pokes"] for v in p["others"]]
    faults = {fault: bool(done) and all(one["found"] for one in done) for fault, done in guarded["faults"].items()}
    same = guarded["answers"] == plain["answers"]
    row = {
        "feature": feature,
        "forwards": [one["stats"].get("forwards") for one in clean],
        "slots": [one["stats"].get("checked_slots") for one in clean],
        "stores": [one["stats"].get("noted_stores", 0) for one in clean],
        "coverage": [e.get("summary") for e in coverage],
        "false": len(false),
        "flips": f"{found}/{len(guarded['pokes'])}",
        "faults": f"{sum(faults.values())}/{len(faults)}",
        "others": len(others),
        "same": same,
        "audit": [e["event"] for e in audits],
        "start_s": guarded["start_s"],
        "traffic_s": (guarded["traffic_s"], plain["traffic_s"]),
    }
    row["ok"] = (
        not false and not others and same and found == len(guarded["pokes"]) and all(faults.values()) and not bad
    )
    row["missed_faults"] = {fault: guarded["faults"][fault] for fault, found in faults.items() if not found}
    row["first_false"], row["first_other"], row["bad_events"] = false[:3], others[:3], bad[:4]
    row["said"] = next((p["said"] for p in guarded["pokes"] if p["said"]), None)
    if "again" in guarded:
        row["again_same"] = guarded["again"] == guarded["answers"]
    return row


def main() -> None:
    """All features that are asked for."""
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="+", choices=[*FEATURES])
    parser.add_argument("--device", default=DEVICE, choices=("cuda", "cpu"))
    parser.add_argument("--limit-s", type=int, default=280, help="most seconds of one engine")
    parser.add_argument("--clean", action="store_true", help="nothing is broken")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    DEVICE = args.device
    OUT.mkdir(parents=True, exist_ok=True)
    if args.child:
        child(args.features[0], args.child)
        return
    rows = []
    for feature in args.features:
        if args.clean:
            row = clean_row(feature, run(feature, "clean", args.limit_s))
        else:
            row = judge(feature, run(feature, "guarded", args.limit_s), run(feature, "plain", args.limit_s))
        (OUT / f"guard-{feature}.json").write_text(json.dumps(row, indent=1))
        print(json.dumps(row, indent=1), flush=True)
        rows.append(row)
    columns = {"feature": 9, "ok": 5, "forwards": 12, "false": 5, "flips": 7, "faults": 6, "others": 6, "same": 5}
    if args.clean:
        columns = {"feature": 10, "ok": 5, "forwards": 12, "false": 5} | dict.fromkeys(COUNTS, 10)
    print("\n" + " ".join(f"{name:>{width}}" for name, width in columns.items()) + " coverage" * (not args.clean))
    for row in rows:
        cells = " ".join(f"{row.get(name)!s:>{width}}" for name, width in columns.items())
        print(f"{cells} {row.get('coverage', '')}")
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
