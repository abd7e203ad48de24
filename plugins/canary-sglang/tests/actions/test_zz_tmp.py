import collections, json, os
import pytest
from tools.recomputes import prompt
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("recompute")]
KV, DT = os.environ["KV"], os.environ.get("DT", "float32")
OPTIONS = {"dtype": DT, "max_total_tokens": int(os.environ.get("TOK", 1536)), "max_running_requests": 6, "kv_cache_dtype": KV, "disable_cuda_graph": True,
    "json_model_override_args": json.dumps({"num_hidden_layers": 3})}
BYTES_OFF = dict(CANARY_READ_CHECK="0", CANARY_SCRUB_BUDGET="0", CANARY_BYTES="off", CANARY_RECOMPUTE="0")
ALL = dict(CANARY_RECOMPUTE="100%", CANARY_READ_CHECK="0", CANARY_SCRUB_BUDGET="0")
def traffic(n):
    shared = prompt("shared", 60)
    lengths = [35, 90, 50, 150, 40, 70]
    return [[*(shared[: 20 + 5 * (i % 8)] if i % 3 == 0 else []), *prompt(i, lengths[i % len(lengths)])] for i in range(n)]
def show(answers):
    print(collections.Counter((a["verdict"], a["reason"]) for a in answers))
    top = collections.defaultdict(list)
    for a in answers:
        for l in a["layers"]: top[l["source"]].append((l["worst"], l["bound"]))
    for s, v in top.items():
        print("  ", s, "nonzero medians", sum(w > 0 for w, _ in v), "of", len(v), "worst", sorted(w for w, _ in v)[-4:], "bound", v[-1][1])
def test_clean(launch):
    watched = launch({"options": OPTIONS}, **ALL)
    done = watched.recompute_traffic(prompts=traffic(int(os.environ.get("N", 64))), new_tokens=60)
    print(KV, DT, done["violations"][:2], done["cached"]); show(done["answers"]); print(done["stats"])
@pytest.mark.parametrize("fault", ["changed_norm", "short_decodes", "skipped_layer"])
def test_broken(launch, fault):
    done = launch({"options": OPTIONS}, **BYTES_OFF).recompute_broken(fault=fault, tokens=50)
    print(fault, done["verdicts"])
    for a in done["answers"]: show([a])
    print([(v["kind"], v.get("layer"), v.get("position"), v.get("request"), v.get("rule")) for v in done["violations"]])
