"""FrozenLake: cross the ice to the goal without stepping into a hole. Reward 1 at the goal, 0 otherwise.

The dynamics are gymnasium's own transition table, slipping included (`is_slippery`: the wanted direction with
probability success_rate, each direction beside it with half the rest, never the opposite one). What is added is text, a
map that the seed alone decides, and a start anywhere from which the goal can be reached.

On every 4x4 map every start is at most 10 moves from the goal, which is what 5 turns of 2 actions allow.
Slips come from the seed too: the episodes of a group that play the same actions slip the same way.
"""

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from nanoragen.envs.base import Game, check_whole


class FrozenLake(Game):
    """
    size          side of the square map, 3 to 10
    is_slippery   moves may go astray
    success_rate  probability of the wanted direction when slippery
    frozen        share of cells that are ice rather than holes, 0.5 to 1
    random_start  start anywhere with a path to the goal; False: the top left corner, as in gymnasium

    Cells are numbered row * size + column. The goal is the bottom right corner.
    """

    actions = ("Left", "Down", "Right", "Up")  # in gymnasium's order
    max_turns = 5
    max_actions_per_turn = 2
    instruction = (
        "You walk on a frozen lake: reach the goal G and step into no hole O. P you, _ ice. "
        "Actions: Left, Down, Right, Up, at most 2 a turn. "
        "Reply <think>your reasoning</think><answer>Down || Left</answer>"
    )

    def __init__(self, size=4, is_slippery=False, success_rate=1 / 3, frozen=0.75, random_start=True):
        super().__init__()
        check_whole("frozen_lake", 3, 10, size=size)
        if not (isinstance(success_rate, (int, float)) and 0 < success_rate <= 1):
            raise ValueError(f"success_rate: {success_rate!r}; valid: above 0, at most 1")
        if not (isinstance(frozen, (int, float)) and 0.5 <= frozen <= 1):
            raise ValueError(f"frozen: {frozen!r}; valid: 0.5 to 1")
        self.size, self.is_slippery, self.success_rate = size, is_slippery, success_rate
        self.frozen, self.random_start = frozen, random_start
        self.goal = size * size - 1

    def _start(self, seed):
        rows = generate_random_map(self.size, self.frozen, seed=int(self.np_random.integers(2**31)))
        lake = FrozenLakeEnv(desc=rows, is_slippery=self.is_slippery, success_rate=self.success_rate)
        self.transitions = lake.unwrapped.P  # [cell][action] -> [(probability, next cell, reward, over)]
        self.holes = frozenset(i for i, c in enumerate("".join(rows)) if c == "H")
        self._values = self._solve()
        starts = [s for s in range(self.goal) if s not in self.holes and self._values[s] > 0]
        self.position = int(self.np_random.choice(starts)) if self.random_start else 0

    def step(self, action):
        name = str(action).strip().capitalize()
        valid, before, reward, over = name in self.actions, self.position, 0.0, self._over()
        if valid and not over:
            outcomes = self.transitions[self.position][self.actions.index(name)]
            pick = self.np_random.choice(len(outcomes), p=[o[0] for o in outcomes])
            _, self.position, reward, over = outcomes[pick]
        self.position = int(self.position)
        return self._result(reward, bool(over), self.position == self.goal, valid, self.position != before)

    def render(self):
        lines = ["".join(self._symbol(r * self.size + c) for c in range(self.size)) for r in range(self.size)]
        row, column = divmod(self.position, self.size)
        beside = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
        holes = [name for name, (r, c) in beside.items()
                 if 0 <= column + c < self.size and (row + r) * self.size + column + c in self.holes]  # fmt: skip
        goal = f"{self.size - 1 - row:+d},{self.size - 1 - column:+d}"  # rows down, columns right of the player
        lines.append(f"goal {goal} holes beside you {' '.join(holes) or 'none'}")
        return "\n".join(lines)

    def best_actions(self) -> list[str]:
        """All moves of the highest expected value: on firm ice those of shortest safe paths."""
        values = [self._move_value(self.position, a) for a in range(4)]
        best = max(values)
        return [n for n, v in zip(self.actions, values) if best > 0 and v > best - 1e-9] if not self._over() else []

    def _solve(self) -> list[float]:
        """Value of each cell: expected 0.97^(moves to the goal), by value iteration; 0 where it is out of reach."""
        self._values = [0.0] * (self.size * self.size)
        change = 1.0
        while change > 1e-9:
            new = [0.0 if c in self.holes or c == self.goal else max(self._move_value(c, a) for a in range(4))
                   for c in range(len(self._values))]  # fmt: skip
            change = max(abs(n - o) for n, o in zip(new, self._values))
            self._values = new
        return self._values

    def _move_value(self, cell, action) -> float:
        return 0.97 * sum(p * (r + self._values[n]) for p, n, r, _ in self.transitions[cell][action])

    def _over(self) -> bool:
        return self.position == self.goal or self.position in self.holes

    def _symbol(self, cell) -> str:
        if cell == self.position:
            return "X" if cell in self.holes else "√" if cell == self.goal else "P"
        return "O" if cell in self.holes else "G" if cell == self.goal else "_"
