"""Theorem proving: the protocol with a stand-in for Lean, and (where there is one) our theorems with the real one."""

import json
import random
import re
import shutil
import stat
import sys

import numpy as np
import pytest
from fake_lean import TROUBLE, fake_lean

from nanoragen.envs import lean
from nanoragen.envs.base import TRAIN_SEEDS
from nanoragen.envs.data import read_rows
from nanoragen.envs.lean import THEOREMS, Lean, is_tactic, own_theorem, theorem_of, verdict
from nanoragen.envs.registry import make
from nanoragen.envs.sandbox import Result

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Lean is run in the sandbox, on Linux only")
PAIR = {"statement": "(a b : Prop) (h1 : a) (h2 : b) : a ∧ b", "proof": ["constructor", "exact h1", "exact h2"]}


@pytest.fixture
def env(tmp_path):
    """One theorem, and the stand-in."""
    (tmp_path / "pair.jsonl").write_text(json.dumps(PAIR))
    env = make("lean", command=fake_lean(tmp_path / "lean"), data=f"{tmp_path}/pair.jsonl", seconds=20.0)
    env.reset(seed=0)
    return env


def test_a_proof_step_by_step(env):
    assert env.render() == "theorem to_prove (a b : Prop) (h1 : a) (h2 : b) : a ∧ b"
    text, reward, terminated, _, info = env.step(" constructor\n")
    assert text.endswith("constructor\nleft to prove:\nh : ?\n⊢ p\n\nh : ?\n⊢ p") and reward == 0 and not terminated
    assert info == {"success": False, "action_is_valid": True, "action_is_effective": True}
    assert env.step("exact h1")[0].count("⊢") == 1
    text, reward, terminated, _, info = env.step("exact h2")
    assert text.endswith("proved") and reward == 1.0 and terminated and info["success"]
    assert env.step("exact h2")[1:3] == (0.0, True)


def test_a_tactic_that_fails_changes_nothing_and_says_why(env):
    env.step("constructor")
    text, reward, terminated, _, info = env.step("simp")
    assert text.endswith("The last tactic failed: tactic failed, there is no simp") and env.tactics == ["constructor"]
    assert info == {"success": False, "action_is_valid": True, "action_is_effective": False} and not reward and not terminated
    assert "failed" not in env.step("exact h1")[0]


def test_goals_left_inside_a_tactic_are_its_fault(env):
    text, _, _, _, info = env.step("have : False := by omega")
    assert "failed: unsolved goals" in text and env.tactics == [] and not info["action_is_effective"]


def test_axioms_of_another_kind_are_no_proof(env):
    text, reward, terminated, *_ = env.step("grind")
    assert text.endswith("it rests on Lean.ofReduceBool") and not reward and not terminated


@pytest.mark.parametrize("trouble", [t for t in TROUBLE if t])
def test_a_prover_in_trouble_proves_nothing(trouble, tmp_path):
    env = make("lean", command=fake_lean(tmp_path / "lean", trouble), seconds=0.5 if "hang" in trouble else 20.0)
    env.reset(seed=0)
    text, reward, terminated, _, info = env.step("exact h1")
    assert not reward and not terminated and not info["success"] and not info["action_is_effective"]
    assert "The last tactic failed: " in text and len(text) < 2500 and env.tactics == []
    assert "hang" not in trouble or "(timeout)" in text


# -- what is never tried -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "sorry", "admit", "exact sorry", "exact (by sorry)", "skip", "stop", "intro h; sorry", "apply sorryAx", "native_decide",
        "decide +native", "run_tac IO.FS.writeFile (System.FilePath.mk x) y", "exact (by_elab do return x)", "exact h #eval 1",
        "exact h\naxiom cheat : False", "exact h axiom cheat : False", "exact h theorem x : True := trivial", "exact cheat /- x -/",
        "exact h -- done", "simp\n  sorry", "exact include_str \"/etc/passwd\"", "exact h open Lean in foo", "exact h set_option x true",
        "exact h macro_rules | x => y", "exact h local notation x => y", "exact h simproc f (_ + _) := fun e => x", "exact h @[simp] def x := 1",
        "exact h instance : Inhabited False := x", "exact h unsafe x", "exact unsafeCast h", "exact h initialize x : IO Unit",
        "exact (show Lean.Elab.Tactic.TacticM Unit from do x)", "exact `x", "exact «x»", "exact h end", "exact h\tend", "exact h\r#eval 1",
        "", " ", "theorem", "Up", "None", "intro" + " x" * 200, "1", "exact\x00", "exact h local x",
    ],
)  # fmt: skip
def test_no_tactics(text):
    stripped = text.strip()
    assert not is_tactic(stripped) or stripped in ("apply sorryAx", "exact unsafeCast h")  # those rest on other axioms


@pytest.mark.parametrize("text", sorted({tactic for _, *proof in THEOREMS for tactic in proof}))
def test_tactics_of_our_proofs(text):
    assert is_tactic(text)


@pytest.mark.parametrize(
    "text",
    ["simp [Nat.add_comm, h] at h1 ⊢", "have h2 : x % 2 = 0 := by omega", "rw [← h1]", "obtain ⟨x, hx⟩ := h", "induction n <;> simp_all",
     "exact fun h => h.1", "refine ⟨_, ?_⟩", "all_goals omega", "constructor <;> intro h", "exact ⟨h1, h2⟩"],
)  # fmt: skip
def test_tactics_of_all_sorts(text):
    assert is_tactic(text)


def test_what_is_no_tactic_never_reaches_lean(env, monkeypatch):
    monkeypatch.setattr(env, "check", lambda *_: 1 / 0)
    before = env.render()
    for text in ("sorry", "exact h #eval 1", "Up", "", "\ud800"):
        after, reward, _, _, info = env.step(text)
        assert after == before and not reward and not info["action_is_valid"]


def test_thousands_of_texts_are_never_a_proof_of_it(monkeypatch):
    """Pieces of real tactics and of ways to cheat: whatever is let through is one line that defines and runs nothing."""
    rng, tried = random.Random(0), 0
    pieces = ["exact h", "intro", "simp", " ", "\n", "sorry", "by", "#print", "axiom x : False", "end", "do", ";", "-- ", "⟨", "h.1",
              "open", "IO"]  # fmt: skip
    for _ in range(3000):
        text = "".join(rng.choice(pieces) + rng.choice(["", " "]) for _ in range(rng.randrange(1, 6))).strip()
        if is_tactic(text):
            tried += 1
            assert "\n" not in text and "#" not in text and "--" not in text
            assert not set(re.findall(r"\w+", text)) & {"sorry", "axiom", "end", "do", "open", "IO"}
    assert tried > 100


# -- the answer of Lean ------------------------------------------------------------------------------------------------


def said(severity, line, data):
    return json.dumps({"severity": severity, "pos": {"line": line, "column": 0}, "data": data})


NONE = said("info", 9, "'to_prove' does not depend on any axioms")
THREE = said("info", 9, "'to_prove' depends on axioms: [propext,\n Classical.choice,\n Quot.sound]")
SORRY = said("info", 9, "'to_prove' depends on axioms: [sorryAx]")


@pytest.mark.parametrize(
    "lines, goals, error",
    [
        ([NONE], "", ""), ([THREE], "", ""), ([said("warning", 1, "unused variable"), NONE], "", ""),
        ([said("error", 2, "unsolved goals\n⊢ p"), SORRY], "⊢ p", ""), ([SORRY], "", "it rests on sorryAx"),
        ([said("error", 3, "unsolved goals\n⊢ p"), SORRY], "", "unsolved goals\n⊢ p"),
        ([said("error", 2, "unsolved goals\n⊢ p"), said("error", 4, "bad"), NONE], "", "bad"),
        ([said("error", 1, "unknown module"), NONE], "", "unknown module"), ([], "", "Lean gave no answer."),
        ([said("warning", 1, "'to_prove' does not depend on any axioms and more")], "", "Lean gave no answer."),
        ([NONE, "{}"], "", "Lean gave an answer that cannot be read."), ([NONE, "null"], "", "Lean gave an answer that cannot be read."),
    ],
)  # fmt: skip
def test_verdict(lines, goals, error):
    assert verdict("\n".join(lines), 2) == (goals, error)


# -- theorems ----------------------------------------------------------------------------------------------------------


def test_own_theorems_have_names_of_their_own_and_are_held_out(tmp_path):
    env = make("lean", command=fake_lean(tmp_path / "lean"))
    train = {env.reset(seed=TRAIN_SEEDS.start + s)[0] for s in range(300)}
    held_out = {env.reset(seed=s)[0] for s in range(300)}
    assert len(train) > 200 and len(held_out) > 200

    def shapes(texts):
        found = set()
        for text in texts:
            names = list(dict.fromkeys(re.findall(r"\b[a-z]\b|\b\d+\b", text)))
            found.add(re.sub(r"\b[a-z]\b|\b\d+\b", lambda m, names=names: f"x{names.index(m[0])}", text))
        return found

    assert not shapes(train) & shapes(held_out)
    assert not any(re.search(r"\b[PQRN]\b", t) for t in train | held_out)


def test_names_are_the_same_in_statement_and_proof():
    class Rng:
        def integers(self, low, high=None):
            return 0 if high is None else 7

        def permutation(self, names):
            return np.array(["x", "y", "z"])

    found = own_theorem(Rng(), [("(P Q : Nat) (h1 : P = Q) : P + N = Q + N", "rw [h1]", "exact f P Q N")])
    assert found.statement == "(x y : Nat) (h1 : x = y) : x + 7 = y + 7" and found.proof == ["rw [h1]", "exact f x y 7"]


@pytest.mark.parametrize(
    "text",
    ["(p : Prop) : p → p", "theorem foo (p : Prop) : p → p := by sorry", "theorem foo.bar' (p : Prop) : p → p := by\n  sorry",
     "lemma x (p : Prop) : p → p := sorry", "example (p : Prop) : p → p :=", "theorem x(p : Prop) : p → p := by"],
)  # fmt: skip
def test_statements_of_files(text):
    assert theorem_of({"statement": text}).statement == "(p : Prop) : p → p"


def test_rows_without_anything_to_prove_are_skipped(tmp_path, capsys):
    rows = [
        '{"statement": ": True", "proof": "intro h\\n  exact h\\n"}',
        '{"statement": "theorem x := by sorry"}',
        '{"statement": 3}',
    ]
    (tmp_path / "d").write_text("\n".join(rows))
    (theorem,) = read_rows(tmp_path / "d", theorem_of)
    assert theorem.statement == ": True" and theorem.proof == ["intro h", "exact h"]  # a text has a tactic a line
    assert "2 of 3 rows cannot be used and are skipped; row 2: an empty statement" in capsys.readouterr().err


def test_what_lean_is_given(tmp_path, monkeypatch):
    row = {"statement": "theorem x (n : Nat)\n    : n = n := by sorry", "header": "import A\nopen B", "proof": ["rfl"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    seen = {}

    def execute(argv, text, **options):
        seen.update(options, argv=argv, text=text)
        return Result("ok", NONE, "", 0.0, "none")

    env = Lean(command=fake_lean(tmp_path / "lean"), data=f"{tmp_path}/a.jsonl", lean_path=f"{tmp_path}/lib")
    env.reset(seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(lean, "execute", execute)
        assert env.step("rfl")[1] == 1.0
    assert seen["text"] == "import A\nopen B\ntheorem to_prove (n : Nat)\n    : n = n := by\n  rfl\n#print axioms to_prove\n"
    assert seen["folders"] == [str(tmp_path / "lean"), f"{tmp_path}/lib"] and seen["environment"]["LEAN_PATH"] == f"{tmp_path}/lib"


def test_without_lean_one_clear_line(tmp_path):
    for command in ("no-such-lean", f"{tmp_path}/lean", ""):
        with pytest.raises(ValueError, match="^command: there is no .*needs Lean 4.*valid: install it") as error:
            make("lean", command=command)
        assert "\n" not in str(error.value)
    other = tmp_path / "lean"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(other.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ValueError, match="^command: .*does not answer .*as Lean 4 does"):
        make("lean", command=str(other))


@pytest.mark.parametrize("options", [{"eval_data": "x"}, {"seconds": 0}])
def test_bad_settings(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: .*valid: "):
        make("lean", **options)


@pytest.mark.skipif(not shutil.which("lean"), reason="needs Lean 4")
def test_our_theorems_with_the_real_lean():
    env = make("lean")
    for statement, *proof in THEOREMS:
        env.reset(seed=0)
        env.theorem = own_theorem(env.np_random, [(statement, *proof)])
        for tactic in env.theorem.proof:
            text, reward, *_ = env.step(tactic)
        assert reward == 1.0, text
    env.reset(seed=0)
    assert "left to prove" in env.step("intro h")[0] or "failed" in env.render()
