"""Variants of attention/03, checked and timed in turns beside cuDNN.

    python3 tune.py [seconds, 230] [--part forward|backward] [--dims 128,64] [--only WORD]
    python3 tune.py --compile    registers and spills for sm_90, without a GPU
    python3 tune.py --interpret  small checks in Triton's interpreter

From the repository root, or with A39_SCRIPT=path of 03-any-attention.py.
"""
import argparse
import ast
import concurrent.futures as futures
import json
import multiprocessing as mp
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

T0 = time.time()
HERE = Path(__file__).resolve().parent
SCRIPT = Path(os.environ.get("A39_SCRIPT", "tutorials/attention/03-any-attention.py"))
TOKENS = 16384
parser = argparse.ArgumentParser()
parser.add_argument("seconds", nargs="?", type=float, default=230)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--interpret", action="store_true")
parser.add_argument("--part", default="forward,backward")
parser.add_argument("--dims", default="128")
parser.add_argument("--only", default="")
parser.add_argument("--all", action="store_true", help="also those that --compile dropped")
if mp.current_process().name == "MainProcess":
    ASKED = parser.parse_args()
else:
    ASKED = parser.parse_args([])
if ASKED.interpret:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(HERE))


def say(*what):
    print(*what, flush=True)


def left():
    return ASKED.seconds - (time.time() - T0)


# The page's definitions, and other forms of its backward kernels ------------

QUERIES_STEP = """    p = tl.exp2(score * scale - lse[:, None])
    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    dp = tl.dot(dy, v.T, input_precision=PRECISION)
"""
QUERIES_EARLY = """    v = v_desc.load([batch, head, start, 0]).reshape(TILE_K, DIM)
    dp = tl.dot(dy, v.T, input_precision=PRECISION)
    p = tl.exp2(score * scale - lse[:, None])
"""
Q_DOT = "    score = tl.dot(q, k.T, input_precision=PRECISION)\n"
KEYS_DP = "    dp = tl.dot(v, dy.T, input_precision=PRECISION)\n"
KEYS_DY = "    dy = dy_desc.load([batch, head, start, 0]).reshape(TILE_Q, DIM)\n"
KEYS_DV = "    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)\n"
K_DOT = "    score = tl.dot(k, q.T, input_precision=PRECISION)\n"
KEYS_DS = "    ds = (p * (dp - delta[None, :])).to(q.dtype)\n"
DELTA = "    delta = tl.load(delta_ptr + query)\n"
FORMS = {
    "": (),
    # dp is begun before the powers, so that they overlap.
    "dp early": (
        (QUERIES_STEP, QUERIES_EARLY),
        (KEYS_DY, ""), (KEYS_DP, ""), (K_DOT, K_DOT + KEYS_DY + KEYS_DP),
    ),
    # dp before dv; dv beside ds
    "dp before dv": ((KEYS_DP, ""), (KEYS_DV, KEYS_DP + KEYS_DV)),
    # dv last: both sums after ds
    "dv last": ((KEYS_DV, ""), (KEYS_DS, KEYS_DS + KEYS_DV)),
    # ds and dk first, dv at the end of the step
    "dv after dk": ((KEYS_DV, ""), ("    return dk, dv\n", KEYS_DV + "    return dk, dv\n")),
    "licm": ((", disable_licm=True\n", "\n"), ("                disable_licm=True,\n", "")),
    "ws": (
        ("tl.range(0, whole, TILE_K, num_stages=STAGES)", "tl.range(0, whole, TILE_K, num_stages=STAGES, warp_specialize=True)"),
        ("whole, queries, TILE_Q, num_stages=STAGES, disable_licm=True", "whole, queries, TILE_Q, num_stages=STAGES, warp_specialize=True"),
    ),
    # programs of the same tile of all heads beside each other
    "heads first": (
        ("    tile = tl.program_id(0) % tiles\n    if CAUSAL", "    tile = tl.program_id(0) // (tl.num_programs(0) // tiles)\n    if CAUSAL"),
        ("    lead = tl.program_id(0) // tiles\n", "    lead = tl.program_id(0) % (tl.num_programs(0) // tiles)\n"),
        ("    first = tl.program_id(0) % tiles * TILE_K\n", "    first = tl.program_id(0) // (tl.num_programs(0) // tiles) * TILE_K\n"),
        ("    k_lead = tl.program_id(0) // tiles\n", "    k_lead = tl.program_id(0) % (tl.num_programs(0) // tiles)\n"),
    ),
}
PAGES = {}
CONSTANTS = ("ON_GPU", "DEVICE", "LOG2E", "TILES", "OWN_AND_STEP", "DTYPES")


def page(form=""):
    """The definitions of the page, without what it runs."""
    if form in PAGES:
        return PAGES[form]
    source = SCRIPT.read_text()
    for old, new in FORMS[form]:
        assert old in source, (form, old)
        source = source.replace(old, new)
    lines = source.splitlines(keepends=True)
    kept = []
    for node in ast.parse(source).body:
        text = ast.unparse(node)
        keep = isinstance(node, (ast.Import, ast.ImportFrom))
        keep |= isinstance(node, ast.FunctionDef) and not re.search("perf_report|custom_op|register_fake", text)
        keep |= isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in CONSTANTS
        if keep and "matplotlib" not in text:
            first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
            kept.append("".join(lines[first - 1 : node.end_lineno]))
    folder = Path(os.environ.get("A39_TMP", "/tmp/a39"))
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / f"page_{form.replace(' ', '_') or 'as_it_is'}.py"
    text = "\n\n".join(kept) + "\n"
    if not file.exists() or file.read_text() != text:
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(file)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    PAGES[form] = __import__(file.stem)
    return PAGES[form]


# The variants, by promise ----------------------------------------------------


def V(kernel, tq, tk, warps, stages, masks="nc", **more):
    """masks: n for not causal, c for causal. more: other constants."""
    return dict(kernel=kernel, tq=tq, tk=tk, warps=warps, stages=stages, masks=masks, **more)


def G(rows, halves, tk, buffers, ping=False, registers=240, masks="nc", order=0, pin=True):
    return dict(kernel="gluon", tq=rows, halves=halves, tk=tk, warps=4, stages=buffers, masks=masks, ping=ping,
                registers=registers, order=order, pin=pin)


VARIANTS = {
    ("fwd", 128): [
        V("page", 128, 64, 4, 2, "n", rule=True), V("page", 64, 64, 4, 3, "c", rule=True),
        G(64, 2, 128, 2), G(64, 2, 128, 2, ping=True), G(64, 2, 128, 2, pin=False), G(64, 2, 128, 2, ping=True, pin=False),
        G(64, 2, 64, 4), G(64, 2, 64, 4, ping=True), G(64, 2, 64, 3),
        G(64, 2, 128, 2, masks="c", order=1), G(64, 2, 64, 4, masks="c", order=1, ping=True),
        V("late", 128, 128, 8, 2), V("late", 128, 64, 8, 3), V("late", 64, 64, 4, 3), V("late", 64, 64, 4, 2),
        V("late", 128, 64, 4, 2), V("late", 64, 128, 4, 2),
        V("early", 128, 128, 8, 2), V("early", 128, 64, 8, 3), V("early", 64, 64, 4, 3), V("early", 64, 64, 4, 2),
        V("early", 128, 64, 4, 2), V("early", 64, 128, 4, 2),
        V("halves", 64, 64, 4, 2), V("halves", 64, 64, 4, 3), V("halves", 128, 64, 8, 2), V("halves", 128, 64, 8, 3),
        V("halves", 128, 128, 8, 2), V("halves", 64, 128, 4, 2), V("halves", 64, 32, 4, 3),
        V("plain", 64, 64, 4, 3, "c", order=1), V("plain", 64, 64, 4, 3, "c", order=2), V("plain", 128, 64, 4, 2, "c", order=1),
        V("plain", 128, 64, 4, 2, "n", check=True), V("plain", 64, 64, 4, 3, "c", check=True),
        V("plain", 128, 64, 4, 3), V("plain", 128, 128, 8, 2), V("plain", 128, 64, 8, 3), V("plain", 128, 64, 8, 4),
        V("plain", 256, 64, 8, 2), V("plain", 256, 32, 8, 3), V("plain", 128, 32, 4, 3), V("plain", 64, 64, 4, 4),
        V("plain", 64, 128, 4, 2),
        V("plain", 128, 64, 4, 2, "n", ws=True), V("plain", 128, 128, 4, 2, "n", ws=True),
        V("plain", 128, 64, 8, 2, "n", ws=True), V("plain", 128, 128, 8, 2, "n", ws=True), V("plain", 64, 64, 4, 2, "n", ws=True),
    ],
    ("queries", 128): [
        V("page", 64, 64, 4, 2, rule=True),
        G(64, 2, 64, 3), G(64, 2, 64, 3, pin=False), G(64, 2, 128, 2), G(64, 2, 128, 2, pin=False), G(64, 2, 64, 2),
        V("page", 128, 32, 8, 3), V("page", 128, 64, 8, 3), V("page", 128, 32, 8, 4), V("page", 128, 64, 8, 2),
        V("page", 64, 64, 4, 2, form="dp early"), V("page", 128, 32, 8, 3, form="dp early"),
        V("page", 128, 64, 8, 3, form="dp early"), V("page", 128, 128, 8, 2, form="dp early"),
        V("page", 128, 32, 4, 2, form="dp early"), V("page", 64, 32, 4, 3, form="dp early"),
        V("page", 64, 64, 4, 3), V("page", 64, 128, 4, 2), V("page", 128, 128, 8, 2),
        V("page", 64, 64, 4, 2, "c", form="heads first"), V("page", 128, 64, 8, 3, "c", form="heads first"),
        V("page", 64, 64, 4, 2, "n", form="ws"),
    ],
    ("keys", 128): [
        V("page", 64, 64, 4, 2, rule=True),
        V("page", 64, 64, 4, 2, form="dp early"), V("page", 64, 64, 4, 2, form="dp before dv"),
        V("page", 64, 64, 4, 2, form="dv last"), V("page", 64, 64, 4, 2, form="dv after dk"),
        V("page", 64, 128, 8, 3, form="dp early"), V("page", 64, 128, 8, 2, form="dp early"),
        V("page", 64, 128, 8, 2, form="dp before dv"), V("page", 64, 128, 8, 2, form="dv last"),
        V("page", 32, 64, 4, 3, form="dp early"), V("page", 32, 128, 8, 3, form="dp early"),
        V("page", 64, 64, 4, 3), V("page", 128, 64, 8, 2), V("page", 64, 64, 4, 1), V("page", 64, 128, 8, 3),
        V("page", 64, 64, 4, 2, "c", form="heads first"), V("page", 64, 64, 4, 2, form="licm"),
        V("page", 64, 64, 4, 2, "n", form="ws"),
    ],
    ("fwd", 64): [
        V("page", 64, 128, 4, 2, rule=True),
        G(64, 2, 128, 2), G(64, 2, 128, 3), G(64, 2, 128, 2, ping=True), G(64, 2, 128, 3, pin=False),
        G(64, 2, 128, 3, masks="c", order=1),
        V("late", 64, 128, 4, 2), V("early", 64, 128, 4, 2), V("halves", 64, 64, 4, 2), V("halves", 64, 128, 4, 2),
        V("late", 128, 64, 4, 2), V("early", 128, 64, 4, 2), V("plain", 64, 128, 4, 2, "c", order=1),
    ],
    ("queries", 64): [
        V("page", 64, 64, 4, 3, rule=True), G(64, 2, 64, 3), G(64, 2, 128, 2), G(64, 2, 128, 2, pin=False),
        V("page", 64, 64, 4, 3, form="dp early"), V("page", 128, 64, 4, 3, form="dp early"),
        V("page", 128, 64, 4, 3), V("page", 128, 64, 8, 3), V("page", 64, 128, 4, 2), V("page", 64, 128, 4, 2, form="dp early"),
    ],
    ("keys", 64): [
        V("page", 64, 64, 4, 3, rule=True), V("page", 64, 64, 4, 3, form="dp early"), V("page", 64, 64, 4, 3, form="dp before dv"),
        V("page", 64, 64, 4, 3, form="dv last"), V("page", 64, 128, 4, 2, form="dp early"), V("page", 64, 128, 8, 3, form="dp early"),
        V("page", 64, 128, 4, 2), V("page", 64, 128, 8, 3), V("page", 128, 64, 4, 2), V("page", 64, 64, 4, 2),
    ],
}


def named(v):
    name = f"{v['kernel']} {v['tq']}x{v['tk']} w{v['warps']} s{v['stages']}"
    if v["kernel"] == "gluon":
        name = f"gluon {v['halves']}*{v['tq']}x{v['tk']} b{v['stages']} r{v['registers']}"
    for key in ("form", "order", "ws", "check", "ping", "pin", "maxnreg"):
        if v.get(key):
            name += f" {key}" if v[key] is True else f" {key} {v[key]}"
    return name + (" RULE" if v.get("rule") else "")


def jobs_of(parts, dims):
    """(kind, D, causal, number of the variant); the page's rule first."""
    found = []
    for (kind, D), variants in VARIANTS.items():
        if D in dims and ("forward" if kind == "fwd" else "backward") in parts:
            for causal in (False, True):
                for n, v in enumerate(variants):
                    if "nc"[causal] in v["masks"] and (ASKED.only in named(v) or v.get("rule")):
                        found.append((kind, D, causal, n))
    return found


def name_of(job):
    kind, D, causal, n = job
    return f"{kind} D{D} {'causal' if causal else 'usual'} {named(VARIANTS[kind, D][n])}"


# Launching -------------------------------------------------------------------


def tensors(torch, D, N, tokens, device, dtype, group=1, heads=None):
    heads = heads or 2048 // D
    def make(h):
        return torch.randn(max(tokens // N, 1), h, N, D, device=device, dtype=dtype)
    t = {n: make(heads) for n in ("q", "y", "dy", "dq")} | {n: make(heads // group) for n in ("k", "v", "dk", "dv")}
    room = -(-N // 256) * 256
    t["lse"] = torch.full((max(tokens // N, 1), heads, room), 12.0, device=device)
    t["delta"] = torch.zeros_like(t["lse"])
    return t


def launch(job, t, how=lambda kernel, grid, **options: kernel[grid](**options)):
    """Run a variant on tensors."""
    kind, D, causal, n = job
    v = VARIANTS[kind, D][n]
    P = page(v.get("form", ""))
    tq, tk = v["tq"], v["tk"]
    batch, heads, N, _ = t["q"].shape
    k_heads = t["k"].shape[1]
    keys = t["k"].shape[2]
    rows = t["lse"].shape[-1]
    scale = D**-0.5
    if v["kernel"] == "gluon":
        return gluon(kind, v, causal, t, how)
    plan = P.options(tq, tk, v["warps"], v["stages"], t["q"].dtype, D)
    if v.get("maxnreg"):
        plan["maxnreg"] = v["maxnreg"]

    def of(name):
        return P.tiles_of(t[name], tk if name in ("k", "v", "dk", "dv") else tq)

    common = dict(rows=rows, heads=heads, queries=N, keys=keys, GROUP=heads // k_heads, CAUSAL=causal, **plan)
    ragged = not causal and keys % tk > 0
    if kind == "fwd":
        common |= dict(q_desc=of("q"), k_desc=of("k"), v_desc=of("v"), y_desc=of("y"), lse_ptr=t["lse"],
                       scale=scale * P.LOG2E, RAGGED=ragged)
        if v["kernel"] == "page":
            kernel = P._any_attention_fwd
        else:
            import kernels

            kernel = getattr(kernels, "fwd_" + v["kernel"])
            common["ORDER"] = v.get("order", 0)
            if v["kernel"] == "plain":
                common |= dict(WS=v.get("ws", False), CHECK=v.get("check", False))
        own = 2 * tq if v["kernel"] == "halves" else tq
        return how(kernel, (-(-N // own) * batch * heads,), **common)
    common |= dict(lse_ptr=t["lse"], delta_ptr=t["delta"], scale=scale, log2e=P.LOG2E,
                   **{f"{n}_desc": of(n) for n in ("q", "k", "v", "dy")})
    if kind == "queries":
        return how(P._any_attention_bwd_queries, (-(-N // tq) * batch * heads,), y_desc=of("y"), dq_desc=of("dq"),
                   RAGGED=ragged, **common)
    return how(P._any_attention_bwd_keys, (-(-keys // tk) * batch * k_heads,), dk_desc=of("dk"), dv_desc=of("dv"), **common)


def gluon(kind, v, causal, t, how):
    import gluon_kernels
    import torch
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, heads, N, D = t["q"].shape
    own = v["tq"] * v["halves"]
    dtype = gl.float16 if t["q"].dtype == torch.float16 else gl.bfloat16

    def of(name, rows):
        block = [rows, D]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor.from_tensor(t[name].view(-1, D), block, layout)

    assert N % own == 0 and t["k"].shape[2] % v["tk"] == 0 and t["lse"].shape[-1] == N
    if kind == "queries":
        return how(gluon_kernels.queries_gluon, (N // own * batch * heads,),
                   **{f"{n}_desc": of(n, v["tk"] if n in "kv" else v["tq"]) for n in ("q", "k", "v", "y", "dy", "dq")},
                   lse_ptr=t["lse"], delta_ptr=t["delta"], heads=heads, queries=N, keys=t["k"].shape[2], scale=D**-0.5,
                   log2e=1.4426950408889634, GROUP=heads // t["k"].shape[1], CAUSAL=causal, DIM=D, ROWS=v["tq"],
                   TILE_K=v["tk"], BUFFERS=v["stages"], REGISTERS=v["registers"], PIN=v["pin"], num_warps=4)
    return how(gluon_kernels.fwd_gluon, (N // own * batch * heads,),
               q_desc=of("q", v["tq"]), k_desc=of("k", v["tk"]), v_desc=of("v", v["tk"]), y_desc=of("y", v["tq"]),
               lse_ptr=t["lse"], heads=heads, queries=N, keys=t["k"].shape[2], scale=D**-0.5 * 1.4426950408889634,
               GROUP=heads // t["k"].shape[1], CAUSAL=causal, DIM=D, ROWS=v["tq"], HALVES=v["halves"], TILE_K=v["tk"],
               BUFFERS=v["stages"], PING=v["ping"], REGISTERS=v["registers"], ORDER=v["order"], PIN=v["pin"], num_warps=4)


# Without a GPU: registers, spills and shared memory --------------------------


def stand_in():
    from types import SimpleNamespace

    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    torch.cuda.is_available = lambda: True
    torch.cuda.Stream = lambda *a: None
    torch.cuda.set_stream = lambda *a: None
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
                                      get_current_stream=lambda device=None: 0))


def resources(job):
    """Registers, bytes of the stack (spills), shared memory; and waits for products in the PTX."""
    import torch
    from triton import knobs

    kind, D, causal, n = job
    t = tensors(torch, D, 4096, TOKENS, "meta", job_dtype(torch))
    if VARIANTS[kind, D][n]["kernel"] == "gluon":
        t["lse"] = t["lse"][..., :4096]
    built = launch(job, t, lambda kernel, grid, **o: kernel.warmup(grid=grid, **o))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True).stdout
        dump = os.environ.get("A39_DUMP")
        if dump:
            stem = Path(dump) / name_of(job).replace(" ", "_")
            stem.with_suffix(".ptx").write_text(built.asm["ptx"])
            stem.with_suffix(".ttgir").write_text(built.asm["ttgir"])
            sass = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True).stdout
            stem.with_suffix(".sass").write_text(sass)
    registers, stack = (int(re.search(rf"\b{w}:(\d+)", text)[1]) for w in ("REG", "STACK"))
    waits = "".join(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", built.asm["ptx"]))
    return registers, stack, built.metadata.shared, waits


def compile_all():
    stand_in()
    out = (HERE / "compiled.txt").open("a")
    for job in jobs_of(ASKED.part.split(","), [int(d) for d in ASKED.dims.split(",")]):
        try:
            registers, stack, shared, waits = resources(job)
            word = "SPILLS" if stack else "ok"
            if shared > 232448:
                word = "TOO MUCH SHARED"
            line = f"{word:6} {registers:3} registers {stack:4} B stack {shared:6} B shared  waits {waits:14} | {name_of(job)}"
        except BaseException as error:
            line = f"FAILED {type(error).__name__}: {str(error).strip().splitlines()[-1][:100] if str(error).strip() else ''} | {name_of(job)}"
        say(line)
        out.write(line + "\n")
        out.flush()


def dropped():
    """Names that compiled.txt says spill or failed; the last line of each counts."""
    file = HERE / "compiled.txt"
    last = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        said, bar, name = line.rpartition(" | ")
        if bar:
            last[name] = said
    return {name for name, said in last.items() if not said.startswith("ok")}


# Checks ----------------------------------------------------------------------


def check(job, torch, device, N, keys=None, group=1, dtype=None, heads=2):
    """The largest error beside float64, relative to the largest number."""
    kind, D, causal, n = job
    torch.manual_seed(0)
    t = tensors(torch, D, N, 2 * N if device != "cpu" else N, device, dtype or torch.float16, group, heads)
    if keys:
        for name in ("k", "v", "dk", "dv"):
            t[name] = torch.randn(*t[name].shape[:2], keys, D, device=device, dtype=t["q"].dtype)
    if VARIANTS[kind, D][n]["kernel"] == "gluon":
        t["lse"] = torch.zeros(*t["q"].shape[:3], device=device)
        t["delta"] = torch.zeros_like(t["lse"])
    wide = [t[x].double().requires_grad_() for x in "qkv"]
    k, v = (x.repeat_interleave(group, 1) for x in wide[1:])
    scores = wide[0] @ k.mT * D**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=device).triu(1), float("-inf"))
    y = scores.softmax(-1) @ v
    lse = scores.logsumexp(-1) * 1.4426950408889634
    dq, dk, dv = torch.autograd.grad(y, wide, t["dy"].double())
    if kind != "fwd":
        t["y"] = y.detach().to(t["q"].dtype)
        t["lse"][..., :N] = lse
        t["delta"][..., :N] = (y.detach() * t["dy"]).sum(-1)
    launch(job, t)
    expected = {"fwd": {"y": y}, "queries": {"dq": dq}, "keys": {"dk": dk, "dv": dv}}[kind]
    error = max(((t[x] - e).abs().max() / e.abs().max()).item() for x, e in expected.items())
    if kind == "fwd":
        error = max(error, ((t["lse"][..., :N] - lse).abs().max() / 10).item())
    return error


def interpret():
    import torch

    skipped, seen = dropped(), set()
    for job in jobs_of(ASKED.part.split(","), [int(d) for d in ASKED.dims.split(",")]):
        v = VARIANTS[job[0], job[1]][job[3]]
        if v["kernel"] == "gluon" or v.get("ws") or v.get("form") == "ws" or name_of(job) in skipped:
            continue
        same = job[0], job[2], v["kernel"], v.get("form"), v.get("order"), v.get("check")
        if same in seen:
            continue
        seen.add(same)
        for N, keys, group in ((256, None, 1), (150, 210, 2), (210, 70, 1)):
            error = check(job, torch, "cpu", N, keys, group, heads=2)
            say(f"{'ok' if error < 4e-3 else 'WRONG'} {error:.1e} N {N} keys {keys or N} group {group} {name_of(job)}")
            if error >= 4e-3:
                break


# On a GPU --------------------------------------------------------------------


def warm(job):
    """In another process: fill the cache of compiled kernels, by what needs no GPU memory to speak of."""
    import torch

    try:
        t = tensors(torch, job[1], 256, 256, "cuda", job_dtype(torch), 1, 2)
        if VARIANTS[job[0], job[1]][job[3]]["kernel"] == "gluon":
            t["lse"] = torch.zeros(*t["q"].shape[:3], device="cuda")
        launch(job, t, lambda kernel, grid, **o: kernel.warmup(grid=grid, **o))
        return job, None
    except BaseException as error:
        return job, f"{type(error).__name__}: {str(error)[-120:]}"


def job_dtype(torch):
    return getattr(torch, os.environ.get("A39_DTYPE", "float16"))


PRODUCTS = {"fwd": 2, "queries": 3, "keys": 4}


class Clock:
    """The page's: CUDA graphs that overwrite L2 and call, in turns, less a graph that only overwrites."""

    def __init__(self, torch):
        self.torch = torch
        self.larger = torch.empty(2**28, dtype=torch.int8, device="cuda")
        self.without = self.recorded(lambda: None)

    def recorded(self, call):
        torch = self.torch
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.larger.zero_()
            result = call()
        graph.replay()
        return graph, result

    def once(self, graph):
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph[0].replay()
        end.record()
        self.torch.cuda.synchronize()
        return 1000 * start.elapsed_time(end)

    def turns(self, calls, rounds):
        graphs = {}
        for name, call in calls.items():
            try:
                graphs[name] = self.recorded(call)
            except Exception as error:
                say("  cannot record", name, str(error)[-100:])
                self.torch.cuda.synchronize()
        times = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                times[name].append(self.once(graph) - self.once(self.without))
        return {name: sorted(each)[rounds // 2] for name, each in times.items()}


def main():
    import torch
    import torch.nn.functional as F

    parts, dims = ASKED.part.split(","), [int(d) for d in ASKED.dims.split(",")]
    jobs = jobs_of(parts, dims)
    if not ASKED.all:
        skipped = dropped()
        jobs = [j for j in jobs if name_of(j) not in skipped or VARIANTS[j[0], j[1]][j[3]].get("rule")]
    out = Path(os.environ.get("OUT", "/tmp")) / "a39.jsonl"
    rows = out.open("a")

    def keep(**row):
        rows.write(json.dumps(row) + "\n")
        rows.flush()

    workers = max(2, min(14, len(os.sched_getaffinity(0)) - 1))
    ready = []
    pool = futures.ProcessPoolExecutor(workers, mp.get_context("spawn"))
    waiting = [pool.submit(warm, job) for job in jobs]
    try:
        for done in futures.as_completed(waiting, timeout=min(100, ASKED.seconds * 0.45)):
            try:
                job, error = done.result()
            except Exception as broken:
                say("a worker broke:", str(broken)[:80])
                break
            if error:
                say("no", name_of(job), error.replace("\n", " "))
            else:
                ready.append(job)
    except futures.TimeoutError:
        say("time for compiling is over")
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
    ready = [job for job in jobs if job in ready]
    P = page()  # its stream becomes the current one
    say(f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {P.triton.__version__}: "
        f"{len(ready)} of {len(jobs)} compiled, {time.time() - T0:.0f} s")
    keep(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=P.triton.__version__)
    dtype = job_dtype(torch)

    # Right? Gluon may hang if it is wrong, so each kernel is tried alone in a process with a limit.
    risky = [j for j in ready if VARIANTS[j[0], j[1]][j[3]]["kernel"] == "gluon" or " ws" in name_of(j)]
    bad = set()
    if risky and left() > 60:
        bad = alone(risky)
    right = []
    for job in ready:
        if job in bad or left() < 40:
            continue
        try:
            error = check(job, torch, "cuda", 512, dtype=dtype)
            torch.cuda.synchronize()
            limit = 4e-3 if dtype == torch.float16 else 2e-2
            say(f"{'right' if error < limit else 'WRONG'} {error:.1e} {name_of(job)}") if error >= limit else None
            keep(check=name_of(job), error=error)
            if error < limit:
                right.append(job)
        except Exception as failed:
            say("FAILED", name_of(job), str(failed)[-100:].replace("\n", " "))
    say(f"{len(right)} right, {time.time() - T0:.0f} s")

    clock = Clock(torch)
    backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
    heat = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    for _ in range(60):
        heat @ heat
    speeds, theirs = {}, {}

    def libraries(D, N, causal):
        t = tensors(torch, D, N, TOKENS, "cuda", dtype)
        q, k, v = (t[x].requires_grad_() for x in "qkv")

        def fwd():
            with torch.nn.attention.sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        y = fwd()
        return fwd, lambda: torch.autograd.grad(y, (q, k, v), t["dy"], retain_graph=True)

    def measure(jobs, N, rounds, D, causal, kinds):
        """In turns with cuDNN: each job's µs; and cuDNN's of both passes."""
        t = tensors(torch, D, N, TOKENS, "cuda", dtype)
        t["lse"] = torch.full(t["q"].shape[:3], 12.0, device="cuda")
        t["delta"] = torch.zeros_like(t["lse"])
        calls = {}
        fwd, bwd = libraries(D, N, causal)
        if "fwd" in kinds:
            calls["cuDNN fwd"] = fwd
        if kinds != ["fwd"]:
            calls["cuDNN bwd"] = bwd
        for job in jobs:
            calls[name_of(job)] = lambda job=job: launch(job, t) and None
        found = clock.turns(calls, rounds)
        for name, us in found.items():
            kind = name.split()[0]
            products = {"cuDNN": 2 if "fwd" in name else 5}.get(kind) or PRODUCTS[kind]
            speed = products * 2 * N * 2048 * TOKENS / us * 1e-6 / (1 + causal)
            speeds.setdefault(name, {})[N] = (us, speed)
            if kind == "cuDNN":
                theirs[D, causal, name.split()[1], N] = us
            keep(name=name, D=D, causal=causal, N=N, us=us, tflops=speed, backend="CUDNN_ATTENTION" if kind == "cuDNN" else None)

    groups = {}
    for job in right:
        groups.setdefault(job[:3], []).append(job)
    order = sorted(groups, key=lambda g: (-g[1], g[0] != "fwd", g[2]))
    # Round one: all of them at 4096 keys, five times.
    for group in order:
        if left() < 20:
            say("no time for", group)
            continue
        try:
            measure(groups[group], 4096, 5, group[1], group[2], [group[0]])
        except Exception as failed:
            say("FAILED", group, str(failed)[-200:])
    # Round two: the best six of each, and the rule, in turns at each length.
    lengths = (16384, 2048, 8192, 1024, 4096)
    chosen = {}
    for group in order:
        mine = [j for j in groups[group] if 4096 in speeds.get(name_of(j), {})]
        mine.sort(key=lambda j: speeds[name_of(j)][4096][0])
        chosen[group] = mine[:6] + [j for j in mine[6:] if VARIANTS[j[0], j[1]][j[3]].get("rule")]
    for N in lengths:
        for group in order:
            if left() < 8:
                continue
            try:
                measure(chosen[group], N, 11, group[1], group[2], [group[0]])
            except Exception as failed:
                say("FAILED", group, N, str(failed)[-200:])

    for group in order:
        kind, D, causal = group
        say(f"\n{kind} D={D} {'causal' if causal else 'not causal'} {dtype}: "
            + ("% of cuDNN (TFLOP/s)" if kind == "fwd" else "TFLOP/s of its own products") + " at 1024 2048 4096 8192 16384 keys")
        mine = sorted((j for j in groups[group] if name_of(j) in speeds), key=lambda j: speeds[name_of(j)].get(4096, (9e9,))[0])
        for job in mine:
            cells = []
            for N in sorted(lengths):
                got = speeds[name_of(job)].get(N)
                base = theirs.get((D, causal, "fwd", N))
                if not got:
                    cells.append("    -     ")
                elif kind == "fwd" and base:
                    cells.append(f"{100 * base / got[0]:5.1f} ({got[1]:3.0f})")
                else:
                    cells.append(f"{got[1]:6.0f}    ")
            say("  " + " ".join(cells) + "  " + named(VARIANTS[kind, D][job[3]]))
    for D in dims:
        for causal in (False, True):
            both = [g for g in order if g[0] != "fwd" and g[1:] == (D, causal)]
            if len(both) < 2:
                continue
            say(f"\nbackward D={D} {'causal' if causal else 'not causal'}: % of cuDNN")
            for who in ("rule", "best"):
                cells = []
                for N in sorted(lengths):
                    us = []
                    for group in both:
                        names = [name_of(j) for j in chosen[group] if who == "best" or VARIANTS[j[0], j[1]][j[3]].get("rule")]
                        us.append(min((speeds[n][N][0] for n in names if N in speeds.get(n, {})), default=None))
                    base = theirs.get((D, causal, "bwd", N))
                    cells.append(f"{100 * base / sum(us):5.1f}" if base and None not in us else "   - ")
                say("  " + " ".join(cells) + "  " + who)
    say(f"{time.time() - T0:.0f} s; rows in {out}")


def alone(jobs):
    """Those that fail or hang in a process of their own."""
    bad = set()
    code = ("import sys, json; sys.argv = ['tune.py']; import tune, torch\n"
            "for job in json.loads(sys.stdin.read()):\n"
            "    print('try', json.dumps(job), flush=True)\n"
            "    e = tune.check(tuple(job), torch, 'cuda', 512, dtype=tune.job_dtype(torch)); torch.cuda.synchronize()\n"
            "    print('did', json.dumps(job), e, flush=True)\n")
    todo = list(jobs)
    while todo and left() > 45:
        try:
            done = subprocess.run([sys.executable, "-c", code], input=json.dumps(todo), capture_output=True, text=True,
                                  timeout=min(40, 15 + 2 * len(todo)), env=os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"})
            text, error = done.stdout, done.stderr
        except subprocess.TimeoutExpired as hung:
            text, error = (hung.stdout or b"").decode(), "it hangs"
        did = [tuple(json.loads(line[4:line.index("]") + 1])) for line in text.splitlines() if line.startswith("did")]
        tried = [tuple(json.loads(line[4:])) for line in text.splitlines() if line.startswith("try")]
        rest = [j for j in todo if j not in did]
        if not rest:
            break
        culprit = next((j for j in tried if j not in did), rest[0])
        say("BAD alone:", name_of(culprit), error.strip()[-120:].replace("\n", " "))
        bad.add(culprit)
        todo = [j for j in rest if j != culprit]
    return bad | (set(todo) if left() <= 45 else set())


if __name__ == "__main__":
    if ASKED.compile:
        compile_all()
    elif ASKED.interpret:
        interpret()
    else:
        main()
