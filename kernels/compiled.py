"""What the compiler makes of the kernels, on a machine without a GPU: `python -m nanoragen.kernels.bench --compile`.

The variants (types, alignment, rules: what is a compile-time constant; not every product of them) are compiled ahead of time for four targets; from what
comes out are read the registers and spills (NVIDIA's assembler, AMD's metadata), the widest global load, asynchronous copies
included, and whether matrix instructions are there. tests/kernels/test_compile.py holds them to bounds. Left out: times, and
shared memory.
"""

import re
import subprocess
import tempfile
from pathlib import Path

from nanoragen.kernels import advantage, cross, linear, logprob, policy

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
P = "*fp32"
KINDS = {  # Triton's types of the arguments that are no float32 pointer
    **dict.fromkeys(("n1", "V", "ignore_index", "B", "k", "N", "D", "P", "spans", "stride", "first"), "i32"),
    **dict.fromkeys(("stride0", "stride1", "h_stride", "w_stride"), "i64"),
    **dict.fromkeys(("scale2", "inv_temperature", "low", "high", "beta", "entropy_coef"), "fp32"),
    **dict.fromkeys(("Y", "OWN", "IDS"), "*i64"),
    **dict.fromkeys(("X", "GRAD", "HIDDEN", "WEIGHT", "BIAS_PTR", "OUT"), "*bf16"),
}
AT_16 = ("X", "GRAD", "HIDDEN", "WEIGHT", "BIAS_PTR", "PARTS", "OUT", "D", "h_stride", "w_stride", "stride", "TOKEN", "SUMS", "L")


def variants():
    """(name, kernel, constants, types that differ from KINDS, warps) of all that a GPU may be asked to compile."""
    tile = {"TILE": logprob.TILE}
    for kind, of in (("bf16", ""), ("fp16", ", fp16"), ("fp32", ", fp32")):
        types = {"X": f"*{kind}", "GRAD": f"*{kind}"}
        yield f"logprob forward{of}", logprob._forward, {"ALIGNED": True, **tile}, types, 8
        for inplace in (False, True):
            constants = {"ALIGNED": True, "ALIGNED_OUT": True, "INPLACE": inplace, **tile}
            yield f"logprob backward{', in place' * inplace}{of}", logprob._backward, constants, types, 8
    yield "logprob forward, rows off 16 bytes", logprob._forward, {"ALIGNED": False, **tile}, {}, 8
    off = {"ALIGNED": False, "ALIGNED_OUT": False, "INPLACE": True, **tile}
    yield "logprob backward, in place, rows off 16 bytes", logprob._backward, off, {}, 8
    for kind in ("k1", "k2", "k3"):
        yield f"policy forward, {kind}", policy._forward, {"KIND": kind, "ALIGNED": True, **tile}, {}, 8
    yield (
        "policy forward, on policy, no KL",
        policy._forward,
        {"KIND": "k3", "ALIGNED": True, "OLD": None, "REF": None, **tile},
        {},
        8,
    )
    for blocks, kind, of in ((linear.BLOCKS16, "bf16", ""), (linear.BLOCKS32, "fp32", ", fp32")):
        types = {n: f"*{kind}" for n in ("HIDDEN", "WEIGHT", "BIAS_PTR", "OUT")}
        for entropy, bias, even in ((True, False, True), (True, True, True), (False, False, True), (True, False, False)):
            which = ", bias" * bias + ", no entropy (cross)" * (not entropy) + ", odd D" * (not even) + of
            constants = {"BIAS": bias, "ENTROPY": entropy, "SPAN": linear.SPAN, "EVEN": even, **blocks}
            yield f"linear, tokens{which}", linear._walk, constants, types if even else {**types, "D": "i32 odd"}, 8
        for bias, even in ((False, True), (True, False)):
            constants = {"BIAS": bias, "EVEN": even, **blocks}
            which = ", bias, odd D" * bias + of
            yield f"linear, d logits{which}", linear._d_logits, constants, types if even else {**types, "D": "i32 odd"}, 8
    for kind, of in (("bf16", ", float32 head"), ("fp16", ", fp16")):  # the first is what training runs: master weights
        types = {n: f"*{kind}" for n in ("HIDDEN", "WEIGHT", "BIAS_PTR", "OUT")} | ({"WEIGHT": P} if kind == "bf16" else {})
        constants = {"BIAS": False, "EVEN": True, **linear.BLOCKS16}
        yield f"linear, tokens{of}", linear._walk, {"ENTROPY": True, "SPAN": linear.SPAN, **constants}, types, 8
        yield f"linear, d logits{of}", linear._d_logits, constants, types, 8
    yield "linear, spans", linear._merge_spans, {"BLOCK": 128}, {}, 4
    yield "cross, segments", cross._segment_sum, {"BLOCK": 128}, {"CU": "*i32"}, 1
    wide = {"WEIGHT": "*fp64", "MATCHED": "*fp64", "MARGINAL": "*fp64", "ABOVE": "*i32", "TIED": "*i32"}
    yield "cross, statistics", cross._row_statistics, {"TIE": cross.TIE, "BLOCK": 128}, wide, 1
    blocks = {"BLOCK_G": advantage.BLOCK_G, "BLOCK_B": advantage.BLOCK_B}
    for rule, softmax in (("none", False), ("top_p", False), ("top_p", True), ("top_k", False), ("min_p", False)):
        constants = dict(
            VALUE=0.9, SELECTION_EPS=0.0, EPS=1e-6, SCALE=True, DDOF=1, RULE=rule, SOFTMAX=softmax, VARIANCE=False, ZERO=False
        )
        which = f"advantage, {rule}{', softmax' * softmax}"
        yield which, advantage._group_advantages, constants | blocks, {"KEEP": "*i1", "SCRATCH": "*fp64", "G": "i32"}, 8


def compile_table(targets=TARGETS) -> list[dict]:
    """A row for each variant and target: registers, spills in bytes, widest global load in bits, matrix instructions."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    rows = []
    for name, kernel, constants, types, warps in variants():
        kinds = {**KINDS, **types}
        signature = {n: "constexpr" if n in constants else kinds.get(n, P).removesuffix(" odd") for n in kernel.arg_names}
        at_16 = [i for i, n in enumerate(kernel.arg_names) if n in AT_16 and n not in constants and kinds.get(n) != "i32 odd"]
        source = ASTSource(kernel, signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in at_16})
        for target in targets:
            where = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
            built = compile(source, target=where, options={"num_warps": warps})
            rows.append({"kernel": name, "target": target, **(_nvidia(built) if "ptx" in built.asm else _amd(built))})
    return rows


def _nvidia(built) -> dict:
    import triton

    ptx = built.asm["ptx"]
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)  # a lone b64 is a target, not a logit
    loads = [int(v or 1) * int(b) for v, b in loads if v or b != "64"]
    copies = [8 * int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+)", ptx)]
    arch = re.search(r"\.target (\w+)", ptx)[1]
    matrix = bool(re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx))
    found = {"registers": None, "spills": None, "load_bits": max(loads + copies, default=0), "matrix": matrix}
    for ptxas in sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"), reverse=True):
        with tempfile.TemporaryDirectory() as folder:  # the newer assembler first: the older may not know the PTX version
            source = Path(folder) / "kernel.ptx"
            source.write_text(ptx)
            done = subprocess.run(
                [ptxas, "-v", f"-arch={arch}", source, "-o", Path(folder) / "out"], capture_output=True, text=True
            )
        said = done.stdout + done.stderr
        if done.returncode == 0:
            found["registers"] = int(re.search(r"Used (\d+) registers", said)[1])
            found["spills"] = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
            break
    return found


def _amd(built) -> dict:
    text = built.asm["amdgcn"]
    widths = [32 * int(n or 1) for n in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?\b", text) if n != "2"]  # as above
    widths += [16] * bool(re.search(r"(?:global|buffer)_load_(?:[us]short|short_d16)", text))
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
        "spills": int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1]),
        "load_bits": max(widths, default=0),
        "matrix": "v_mfma" in text,
    }


def markdown(rows) -> str:
    """The table: a line for each variant, registers and widest load for each target."""
    targets = list(dict.fromkeys(r["target"] for r in rows))
    out = [f"| kernel | {' | '.join(targets)} |", "|---|" + "---|" * len(targets)]
    for name in dict.fromkeys(r["kernel"] for r in rows):
        cells = [next(r for r in rows if (r["kernel"], r["target"]) == (name, t)) for t in targets]
        said = (
            f"{r['registers']}, {r['load_bits']}" + ", matrix" * r["matrix"] + f", **{r['spills']} B spilled**" * bool(r["spills"])
            for r in cells
        )
        out.append(f"| {name} | {' | '.join(said)} |")
    return "\n".join(out)
