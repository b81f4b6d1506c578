"""Theorems proved tactic by tactic: an action is one Lean 4 tactic, the local `lean` says what is left to prove.

Reward 1 when nothing is left, 0 otherwise. A tactic that fails changes nothing, and its error is shown.

Each tactic is tried at the end of the whole proof so far, by a fresh `lean` that reads a file and answers in JSON, so there is no
state that a tactic could spoil. Proved means: Lean reports no error, and the theorem rests on no axioms but Lean's own three
(`#print axioms`). Lean can run programs while it checks, so a tactic must begin like one (TACTICS) and hold nothing that defines,
runs or gives up (FORBIDDEN), or it is not tried; and Lean runs in the sandbox (sandbox.py), without network.

Needs Lean 4 (https://lean-lang.org). Left out: several tactics an action, structured proofs over several lines, and a Lean that
keeps a library loaded (with a large one each check takes as long as importing it).
"""

import functools
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field

from nanoragen.envs.base import CHARSET, Game, held_out
from nanoragen.envs.data import bundled, read_both, read_rows
from nanoragen.envs.sandbox import execute, isolation

MAX_LENGTH = 300  # characters of a tactic
SHOWN = 1500  # characters of goals, or of an error
LIMITS = {"memory": 16 << 30, "output": 1 << 18, "processes": 64}  # Lean maps its library, and starts threads
SIGNS = "∀∃λ→←↔∧∨¬≠≤≥×∣⊢⟨⟩·∘αβγℕℤℝ∈∉⊆∅₀₁₂₃✝ᵢ⁻¹▸≡∑∏"
NAME = "to_prove"
THEOREMS = bundled("lean_theorems")  # [statement, tactic, ...] each
NAMES = "abcdefgkmnpqrstuvwxyz"  # of what they are about
AXIOMS = {"propext", "Classical.choice", "Quot.sound"}
TACTICS = set(
    "ac_rfl aesop all_goals any_goals apply assumption by_cases by_contra cases change congr constructor contradiction contrapose "
    "decide exact exacts exfalso exists ext field_simp first funext generalize grind have induction injection intro intros left "
    "linarith nlinarith norm_num obtain omega positivity push_neg rcases refine repeat revert rfl right ring rintro rw show simp "
    "simp_all simp_arith simpa specialize split subst suffices symm tauto trivial unfold use".split()
)
FORBIDDEN = re.compile(
    r"[\x00-\x1f#\"«»`]|--|/-|@\["  # other lines, commands, texts, quotations, comments, attributes
    r"|\b(sorry|admit|stop|native|native_decide|run_\w+|by_elab|elab\w*|macro\w*|syntax|notation|infix\w*|prefix|postfix|do|eval\w*"
    r"|axiom|constant|opaque|unsafe|partial|theorem|lemma|example|def|abbrev|instance|structure|inductive|class|alias|namespace"
    r"|section|end|variable|universe|import|open|export|include|omit|private|protected|noncomputable|attribute|set_option|local"
    r"|scoped|initialize|\w*simproc\w*|builtin_\w+|declare_\w+|register_\w+|include_\w+|binder_predicate|unif_hint|implemented_by"
    r"|extern|mutual|deriving|IO|Lean|System)\b"
)


@dataclass
class Theorem:
    statement: str  # what stands between the name and ":=": "(p : Prop) : p → p"
    header: str = ""  # imports and the like
    proof: list[str] = field(default_factory=list)  # tactics; empty: not known


class Lean(Game):
    """
    command     Lean: a name or a path
    lean_path   folders of compiled libraries, separated by ":" (what `lake env printenv LEAN_PATH` prints)
    data        file of theorems instead (JSON or JSONL): rows with `statement`, and if they like `header` and `proof` (a list)
    eval_data   file that evaluation seeds draw from; "": the same file
    seconds     of one check
    """

    max_turns = 8
    max_actions_per_turn = 1
    instruction = (
        "Prove the theorem in Lean 4, one tactic at a time; you see what is left to prove. "
        "Reply <think>your reasoning</think><answer>intro h</answer>"
    )

    def __init__(self, command="lean", lean_path="", data="", eval_data="", seconds=30.0):
        super().__init__()
        self.data, self.eval_data = read_both(data, eval_data, lambda path: read_rows(path, theorem_of))
        if not (isinstance(seconds, int | float) and seconds > 0):
            raise ValueError(f"seconds: {seconds!r}; valid: a number above 0")
        self.prefix, self.lean_path, self.seconds = lean_prefix(command), lean_path, seconds
        charset = CHARSET + SIGNS
        self.observation_space = type(self.observation_space)(max_length=20_000, charset=charset)
        self.action_space = type(self.action_space)(max_length=2_000, charset=charset)
        isolation()  # says so, once, where Lean is not isolated

    def _start(self, seed):
        evaluation = held_out(seed)
        if rows := self.eval_data if evaluation else self.data:
            self.theorem = rows[self.np_random.integers(len(rows))]
        else:
            self.theorem = own_theorem(self.np_random, THEOREMS[1::2] if evaluation else THEOREMS[::2])
        self.tactics, self.goals, self.error, self.right = [], "", "", False

    def step(self, action):
        tactic = str(action).strip()
        valid, effective = not self.right and is_tactic(tactic), False
        if valid:
            goals, self.error = self.check([*self.tactics, tactic])
            if effective := not self.error:
                self.tactics.append(tactic)
                self.goals, self.right = goals, not goals
        return self._result(self.right and valid, self.right, self.right, valid, effective)

    def check(self, tactics: list[str]) -> tuple[str, str]:
        """(what is left to prove, "" for nothing; why the last tactic failed, "" if it did not)."""
        before = [*self.theorem.header.splitlines(), *f"theorem {NAME} {self.theorem.statement} := by".splitlines()]
        text = "\n".join([*before, *(f"  {t}" for t in tactics), f"#print axioms {NAME}", ""])
        result = execute(
            [f"{self.prefix}/bin/lean", "--stdin", "--json", "--threads=1"], text,
            environment={"HOME": "/tmp", "LEAN_PATH": self.lean_path},
            folders=[self.prefix, *filter(None, self.lean_path.split(":"))], seconds=self.seconds, **LIMITS,
        )  # fmt: skip
        if result.status not in ("ok", "error"):
            return "", f"Lean was ended ({result.status})."
        goals, error = verdict(result.stdout, len(before))
        if result.status == "error" and not goals and not error:  # it failed, and does not say at what
            return "", "Lean failed."
        return goals, error

    def render(self):
        lines = [f"theorem {NAME} {self.theorem.statement}", *(f"  {t}" for t in self.tactics)]
        lines += ["proved"] if self.right else [f"left to prove:\n{self.goals}"] if self.goals else []
        lines += [f"The last tactic failed: {self.error}"] if self.error else []
        return printable("\n".join(lines))

    def random_action(self, rng) -> str:
        return ("rfl", "assumption", "constructor", "intro h", "simp", "omega")[rng.integers(6)]

    def best_actions(self) -> list[str]:
        """The next tactic of the known proof, as long as it was followed."""
        n = len(self.tactics)
        return [self.theorem.proof[n]] if not self.right and self.tactics == self.theorem.proof[:n] != self.theorem.proof else []


@functools.cache
def lean_prefix(command: str) -> str:
    """The folder of Lean (bin/lean, its library). ValueError where there is none, or it does not answer."""
    program = shutil.which(command)
    if not program:
        raise ValueError(
            f"command: there is no {command!r} here, and lean needs Lean 4; valid: install it (https://lean-lang.org), or "
            "--env_options command=PATH"
        )
    try:
        done = subprocess.run([program, "--print-prefix"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        prefix = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        prefix = ""
    if not os.access(f"{prefix}/bin/lean", os.X_OK):
        raise ValueError(f"command: {command!r} does not answer to --print-prefix as Lean 4 does; valid: the program `lean`")
    return os.path.realpath(prefix)


def is_tactic(text: str) -> bool:
    head = re.match(r"[A-Za-z_]+", text)
    return bool(head) and head[0].lower() in TACTICS and len(text) <= MAX_LENGTH and not FORBIDDEN.search(text)


def verdict(answer: str, first: int) -> tuple[str, str]:
    """(goals, error) from the lines that `lean --json` printed; the proof begins after line `first`.

    Goals that are left are reported as an error at the theorem's `by`. Any other error is the fault of a tactic, also goals left
    inside one: those would count as given up for the rest of the proof.
    """
    goals, axioms = [], None
    for line in answer.splitlines():
        try:
            message = json.loads(line)
            severity, data, at = message["severity"], str(message["data"]), int(message["pos"]["line"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return "", "Lean gave an answer that cannot be read."
        if severity not in ("error", "warning", "information", "info"):
            return "", "Lean gave an answer that cannot be read."
        if severity == "error" and data.startswith("unsolved goals") and at <= first:
            goals.append(data.removeprefix("unsolved goals").strip())
        elif severity == "error":
            return "", data[:SHOWN]
        elif severity != "warning" and (
            found := re.fullmatch(rf"'{NAME}' (?:does not depend on any axioms|depends on axioms: \[(.*)\])", data, re.DOTALL)
        ):
            axioms = (axioms or set()) | {a.strip() for a in (found[1] or "").split(",")} - {""}
    if goals and goals[0]:
        return "\n".join(goals)[:SHOWN], ""
    if axioms is None or goals:
        return "", "Lean gave no answer."
    return "", f"it rests on {', '.join(sorted(axioms - AXIOMS))}" if axioms - AXIOMS else ""


def own_theorem(rng, theorems) -> Theorem:
    """One of our own, with names of its own."""
    statement, *proof = theorems[rng.integers(len(theorems))]
    names = dict(zip("PQR", rng.permutation(list(NAMES))[:3].tolist())) | {"N": str(rng.integers(2, 100))}
    statement, *proof = (re.sub(r"\b[PQRN]\b", lambda m: names[m[0]], text) for text in (statement, *proof))
    return Theorem(statement, proof=proof)


def theorem_of(row: dict) -> Theorem:
    """A row of a file; `statement` may also come as "theorem name (p : Prop) : p → p := by sorry"."""
    if not isinstance(row.get("statement"), str):
        raise ValueError("no statement; valid: statement, and if known header and proof")
    statement = re.sub(r"^\s*(theorem|lemma|example)\s+([^\s:({\[]+)?", "", row["statement"])
    statement = re.sub(r"\s*:=\s*(by)?(\s+sorry)?\s*$", "", statement).strip()
    if not statement:
        raise ValueError("an empty statement; valid: as in '(p : Prop) : p → p'")
    proof = row.get("proof") or []
    proof = [line.strip() for line in proof.splitlines() if line.strip()] if isinstance(proof, str) else [str(t) for t in proof]
    return Theorem(statement, str(row.get("header") or ""), proof)


def printable(text: str) -> str:
    return "".join(c if c in CHARSET or c in SIGNS else "?" for c in text)
