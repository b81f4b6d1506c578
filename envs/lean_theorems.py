"""Theorems of envs/lean.py, for Lean 4 without a library: statement, then the tactics of a proof.

P, Q and R stand for names of propositions and numbers, N for a number; each instance has its own. Every second theorem is for
evaluation seeds only.
"""

NAMES = "abcdefgkmnpqrstuvwxyz"

THEOREMS = [
    ("(P : Prop) : P → P", "intro h1", "exact h1"),
    ("(P Q : Prop) : P → Q → P", "intro h1 h2", "exact h1"),
    ("(P Q : Prop) (h1 : P) (h2 : Q) : P ∧ Q", "constructor", "exact h1", "exact h2"),
    ("(P Q : Prop) (h1 : P ∧ Q) : Q ∧ P", "constructor", "exact h1.right", "exact h1.left"),
    ("(P Q : Prop) (h1 : P) : P ∨ Q", "left", "exact h1"),
    ("(P Q : Prop) (h1 : Q) : P ∨ Q", "right", "exact h1"),
    ("(P Q : Prop) (h1 : P → Q) (h2 : P) : Q", "apply h1", "exact h2"),
    ("(P Q R : Prop) (h1 : P → Q) (h2 : Q → R) : P → R", "intro h3", "apply h2", "apply h1", "exact h3"),
    ("(P Q : Prop) (h1 : P ∨ Q) : Q ∨ P", "rcases h1 with h2 | h2", "exact Or.inr h2", "exact Or.inl h2"),
    ("(P Q R : Prop) (h1 : P ∧ Q ∧ R) : R ∧ P", "constructor", "exact h1.2.2", "exact h1.1"),
    ("(P : Prop) (h1 : P) : ¬¬P", "intro h2", "exact h2 h1"),
    ("(P Q : Prop) (h1 : P → Q) (h2 : ¬Q) : ¬P", "intro h3", "apply h2", "apply h1", "exact h3"),
    ("(P Q : Prop) (h1 : P) (h2 : ¬P) : Q", "exact absurd h1 h2"),
    ("(P Q R : Prop) (h1 : P ∧ Q → R) : P → Q → R", "intro h2 h3", "apply h1", "exact And.intro h2 h3"),
    ("(P Q R : Prop) (h1 : P → Q → R) : P ∧ Q → R", "intro h2", "exact h1 h2.left h2.right"),
    ("(P Q : Prop) (h1 : P ↔ Q) (h2 : Q) : P", "exact h1.mpr h2"),
    ("(P Q : Prop) (h1 : P → Q) (h2 : Q → P) : P ↔ Q", "constructor", "exact h1", "exact h2"),
    ("(P Q R : Prop) (h1 : P ∨ Q) (h2 : P → R) (h3 : Q → R) : R", "exact Or.elim h1 h2 h3"),
    ("(P Q : Nat) : P + Q = Q + P", "exact Nat.add_comm P Q"),
    ("(P Q R : Nat) : P + Q + R = P + (Q + R)", "exact Nat.add_assoc P Q R"),
    ("(P Q : Nat) (h1 : P = Q) : P + N = Q + N", "omega"),
    ("(P Q : Nat) (h1 : P < Q) : P + N < Q + N", "omega"),
    ("(P Q R : Nat) (h1 : P ≤ Q) (h2 : Q ≤ R) : P ≤ R", "exact Nat.le_trans h1 h2"),
    ("(P Q R : Nat) (h1 : P < Q) (h2 : Q < R) : P < R", "exact Nat.lt_trans h1 h2"),
    ("(P : Nat) (h1 : P > N) : P ≠ 0", "intro h2", "omega"),
    ("(P : Nat) : P + N > P ∨ P = N", "left", "omega"),
    ("(P Q : Nat) (h1 : P = Q) : Q = P", "exact h1.symm"),
    ("(P Q R : Nat) (h1 : P = Q) (h2 : Q = R) : P = R", "rw [h1]", "exact h2"),
    ("(P Q : Nat) (h1 : P + N = Q + N) : P = Q ∧ Q = P", "constructor", "omega", "omega"),
    ("(P Q : Nat) (h1 : P ≤ Q) (h2 : Q ≤ P) : P = Q ∨ P = N", "left", "omega"),
    ("(f : Nat → Nat) (P Q : Nat) (h1 : P = Q) : f P = f Q", "rw [h1]"),
    ("(P Q : Nat) : (P + Q) * N = P * N + Q * N", "exact Nat.add_mul P Q N"),
]
