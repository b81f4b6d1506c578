"""Bandit: two arms, one pull. What the arms are called hints at which one pays.

The better arm pays 1 with probability 0.8, the other with 0.2. Whether each would pay is decided at `reset`, so the
seed alone decides the instance and all episodes of a group draw the same payments. Success is pulling the better arm,
paid or not: a policy that guesses succeeds half the time.

Left out: many arms, and several pulls of the same machines (there is nothing to explore in one pull).
"""

from nanoragen.envs.base import Game

# From best to worst. An instance pairs two arms at least six places apart.
ARMS = (
    "Crown", "Diamond", "Gold", "Ruby", "Pearl", "Silver", "Amber", "Jade", "Bronze", "Copper", "Silk", "Oak",
    "Brick", "Clay", "Straw", "Gravel", "Chalk", "Twig", "Rust", "Ash", "Dust", "Mud", "Slime", "Trash",
)  # fmt: skip
GAP = 6


class Bandit(Game):
    """
    pay_better, pay_worse   probabilities that an arm pays 1
    """

    max_turns = 1
    max_actions_per_turn = 1
    instruction = (
        "You stand before two slot machines and pull one. Their names hint at what they pay. "
        "Answer with a name. Reply <think>your reasoning</think><answer>Name</answer>"
    )

    def __init__(self, pay_better=0.8, pay_worse=0.2):
        super().__init__()
        numbers = all(isinstance(p, (int, float)) for p in (pay_better, pay_worse))
        if not (numbers and 0 <= pay_worse < pay_better <= 1):
            raise ValueError(f"pay_better: {pay_better!r}, pay_worse {pay_worse!r}; valid: 0 <= worse < better <= 1")
        self.pay_better, self.pay_worse = pay_better, pay_worse

    def _start(self, seed):
        rng = self.np_random
        better = int(rng.integers(len(ARMS) - GAP))
        worse = int(rng.integers(better + GAP, len(ARMS)))
        self.better = ARMS[better]
        self.actions = (ARMS[better], ARMS[worse]) if rng.random() < 0.5 else (ARMS[worse], ARMS[better])
        pay = {ARMS[better]: self.pay_better, ARMS[worse]: self.pay_worse}
        self.pays = {arm: bool(rng.random() < p) for arm, p in pay.items()}
        self.pulled = None

    def step(self, action):
        name = str(action).strip().capitalize()
        valid = name in self.actions and self.pulled is None
        if valid:
            self.pulled = name
        reward = float(valid and self.pays[name])
        return self._result(reward, self.pulled is not None, self.pulled == self.better, valid)

    def render(self):
        text = f"machines {self.actions[0]} and {self.actions[1]}"
        return text if self.pulled is None else f"{text}\n{self.pulled} pays {int(self.pays[self.pulled])}"

    def best_actions(self) -> list[str]:
        """The better arm."""
        return [self.better] if self.pulled is None else []
