"""What the compiler makes of the kernels, on a machine without a GPU: `python -m nanoragen.kernels.bench --compile`.

The variants (types, alignment, rules: what is a compile-time constant; not every product of them) are compiled ahead of time
for four targets. Read from the results: registers and spills (NVIDIA's assembler, AMD's metadata), the widest global load,
asynchronous copies included, and whether there are matrix instructions. tests/kernels/test_compile.py bounds them. Left out:
times, and shared memory.
"""

import re
import subprocess
import tempfile
from pathlib import Path

from nanoragen.kernels import advantage, cross, linear, logprob, policy

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
TYPES = {  # Triton's types of the arguments; what is not here is a float32 pointer
    **dict.fromkeys(("n_inner", "V", "ignore_index", "B", "G", "k", "N", "D", "P"), "i32"),
    **dict.fromkeys(("n_spans", "grad_logits_stride", "first_column"), "i32"),
    **dict.fromkeys(("stride_outer", "stride_inner", "hidden_stride", "weight_stride"), "i64"),
    **dict.fromkeys(("log2_scale", "inv_temperature", "ratio_low", "ratio_high", "beta", "entropy_coef"), "fp32"),
    **dict.fromkeys(("targets_ptr", "own_ptr", "group_ids_ptr"), "*i64"),
}
# Arguments that Triton would find to be multiples of 16 (bytes, for a pointer) in an ordinary call.
MULTIPLES_OF_16 = (
    "logits_ptr", "grad_logits_ptr", "hidden_ptr", "weight_ptr", "bias_ptr", "partials_ptr", "D", "hidden_stride",
    "weight_stride", "grad_logits_stride", "sums_ptr",
)  # fmt: skip


def variants():
    """(name, kernel, constants, types beside TYPES, warps) of what a GPU may be asked to compile."""
    block = {"BLOCK_V": logprob.BLOCK_V}
    fwd, bwd, policy_fwd = logprob._logprob_entropy_fwd_kernel, logprob._logprob_entropy_bwd_kernel, policy._policy_loss_fwd_kernel
    for kind, suffix in (("bf16", ""), ("fp16", ", fp16"), ("fp32", ", fp32")):
        types = {"logits_ptr": f"*{kind}", "grad_logits_ptr": f"*{kind}"}
        yield f"logprob forward{suffix}", fwd, {"ALIGNED": True, **block}, types, 8
        for inplace in (False, True):
            constants = {"ALIGNED": True, "ALIGNED_OUT": True, "INPLACE": inplace, **block}
            yield f"logprob backward{', in place' * inplace}{suffix}", bwd, constants, types, 8
    types = {"logits_ptr": "*bf16", "grad_logits_ptr": "*bf16"}
    yield "logprob forward, rows off 16 bytes", fwd, {"ALIGNED": False, **block}, types, 8
    unaligned = {"ALIGNED": False, "ALIGNED_OUT": False, "INPLACE": True, **block}
    yield "logprob backward, in place, rows off 16 bytes", bwd, unaligned, types, 8
    for kind in ("k1", "k2", "k3"):
        yield f"policy forward, {kind}", policy_fwd, {"KL_KIND": kind, "ALIGNED": True, **block}, types, 8
    on_policy = {"KL_KIND": "k3", "ALIGNED": True, "old_logprob_ptr": None, "ref_logprob_ptr": None, **block}
    yield "policy forward, on policy, no KL", policy_fwd, on_policy, types, 8

    tokens, d_logits = linear._partial_softmax_kernel, linear._grad_logits_kernel
    matrices = ("hidden_ptr", "weight_ptr", "bias_ptr", "grad_logits_ptr")
    for blocks, kind, suffix in ((linear.BLOCKS16, "bf16", ""), (linear.BLOCKS32, "fp32", ", fp32")):
        types = dict.fromkeys(matrices, f"*{kind}")
        for entropy, bias, even in ((True, False, True), (True, True, True), (False, False, True), (True, False, False)):
            which = ", bias" * bias + ", no entropy (cross)" * (not entropy) + ", odd D" * (not even) + suffix
            constants = {"HAS_BIAS": bias, "WITH_ENTROPY": entropy, "SPAN": linear.SPAN, "EVEN_D": even, **blocks}
            yield f"linear, tokens{which}", tokens, constants, types if even else {**types, "D": "i32 odd"}, 8
        for bias, even in ((False, True), (True, False)):
            constants = {"HAS_BIAS": bias, "EVEN_D": even, **blocks}
            which = ", bias, odd D" * bias + suffix
            yield f"linear, d logits{which}", d_logits, constants, types if even else {**types, "D": "i32 odd"}, 8
    float32_head = dict.fromkeys(matrices, "*bf16") | {"weight_ptr": "*fp32"}  # what training runs: master weights
    for types, suffix in ((float32_head, ", float32 head"), (dict.fromkeys(matrices, "*fp16"), ", fp16")):
        constants = {"HAS_BIAS": False, "EVEN_D": True, **linear.BLOCKS16}
        yield f"linear, tokens{suffix}", tokens, {"WITH_ENTROPY": True, "SPAN": linear.SPAN, **constants}, types, 8
        yield f"linear, d logits{suffix}", d_logits, constants, types, 8
    yield "linear, spans", linear._combine_kernel, {"BLOCK_P": 128}, {}, 4
    yield "cross, segments", cross._segment_sum_kernel, {"BLOCK": 128}, {"cu_seqlens_ptr": "*i32"}, 1
    types = dict.fromkeys(("weights_ptr", "matched_ptr", "marginal_ptr"), "*fp64") | {"above_ptr": "*i32", "tied_ptr": "*i32"}
    yield "cross, statistics", cross._row_statistics_kernel, {"TIE": cross.TIE, "BLOCK": 128}, types, 1
    settings = dict(
        VALUE=0.9, SELECTION_EPS=0.0, EPS=1e-6, DIVIDE_BY_STD=True, DDOF=1, VARIANCE=False, INCLUDE_ZERO=False,
        BLOCK_G=advantage.BLOCK_G, BLOCK_B=advantage.BLOCK_B,
    )  # fmt: skip
    types = {"keep_ptr": "*i1", "scratch_ptr": "*fp64"}
    for rule, softmax in (("none", False), ("top_p", False), ("top_p", True), ("top_k", False), ("min_p", False)):
        constants = {"RULE": rule, "SOFTMAX": softmax, **settings}
        yield f"advantage, {rule}{', softmax' * softmax}", advantage._group_advantages_kernel, constants, types, 8


def compile_table(targets=TARGETS) -> list[dict]:
    """A row for each variant and target: registers, spills in bytes, widest global load in bits, matrix instructions."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    rows = []
    for name, kernel, constants, types, warps in variants():
        types = {**TYPES, **types}
        names = [n for n in kernel.arg_names if n in MULTIPLES_OF_16 and n not in constants and types.get(n) != "i32 odd"]
        signature = {n: types.get(n, "*fp32").removesuffix(" odd") for n in kernel.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        attrs = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in names}
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
        for target in targets:
            where = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
            built = compile(source, target=where, options={"num_warps": warps})
            rows.append({"kernel": name, "target": target, **(_nvidia(built) if "ptx" in built.asm else _amd(built))})
    return rows


def _nvidia(built) -> dict:
    import triton

    ptx = built.asm["ptx"]
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)  # a single b64 is a target, not a logit
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
