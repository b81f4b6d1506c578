"""Sudoku: fill the grid so that every row, column and box holds each digit once.

Reward 1 for the full grid, 0 otherwise (RAGEN's). A digit is only written where its row, column and box allow it, so a full
grid is a right one: any valid completion counts, it need not be the one the puzzle was made from. A digit that is allowed now
may still be wrong; own digits can be overwritten, or cleared with digit 0.

Puzzles are made by taking digits from a random full grid for as long as exactly one solution remains.

Left out: difficulty graded by the techniques a person would need. The number of clues is what is chosen.
"""

import itertools
import math
import re
from collections.abc import Iterator

from nanoragen.envs.base import Game

# size -> (fewest clues, default clues, placements a turn). Random puzzles seldom reach fewer clues than these.
SIZES = {4: (4, 12, 2), 9: (24, 36, 5)}
ACTION = re.compile(r"([1-9])[\s,]+([1-9])[\s,]+([0-9])")
SENTENCE = re.compile(r"place ([0-9]) (?:at|in) row ([1-9]),? col(?:umn)? ([1-9])", re.IGNORECASE)  # RAGEN's other spelling


class Sudoku(Game):
    """
    size    side of the grid: 4 or 9
    clues   digits given at the start; None: 12 of 16, 36 of 81

    State: `cells`, a list of size * size digits row by row, 0 where empty. Actions are "row column digit", from 1.
    """

    max_turns = 3  # of the default puzzle; turns for all its blanks, and one more
    max_actions_per_turn = 2

    def __init__(self, size=4, clues=None):
        super().__init__()
        if not (isinstance(size, int) and size in SIZES):
            raise ValueError(f"size: {size!r} is not possible in sudoku; valid: 4, 9")
        fewest, default, self.max_actions_per_turn = SIZES[size]
        clues = default if clues is None else clues
        if not (isinstance(clues, int) and fewest <= clues < size * size):
            raise ValueError(f"clues: {clues!r} is not possible in sudoku with size {size}; valid: {fewest} to {size * size - 1}")
        self.size, self.clues = size, clues
        self.max_turns = -(-(size * size - clues) // self.max_actions_per_turn) + 1
        self.instruction = (
            f"You solve a Sudoku: every row, column and box holds 1 to {size} once. "
            f"Answer row column digit, from 1, at most {self.max_actions_per_turn} a turn; digit 0 clears a cell. "
            "Reply <think>your reasoning</think><answer>2 1 4 || 3 2 1</answer>"
        )

    def _start(self, seed):
        while not self._draw_puzzle():  # no cell can be taken any more, and there are still too many clues (rare)
            pass

    def step(self, action):
        placement, before = self._read(str(action)), list(self.cells)
        valid = placement is not None and not self._solved() and self._allowed(*placement)
        if valid:
            cell, digit = placement
            self.cells = [*self.cells[:cell], digit, *self.cells[cell + 1 :]]  # a new list: a copy of this game keeps its own
        effective, solved = self.cells != before, self._solved()
        return self._result(solved and effective, solved, solved, valid, effective)

    def render(self):
        n, box = self.size, math.isqrt(self.size)
        lines = []
        for r in range(n):
            if r and r % box == 0:
                lines.append("+".join(["-" * box] * box))
            row = "".join(str(d or ".") for d in self.cells[r * n : (r + 1) * n])
            lines.append("|".join(row[c : c + box] for c in range(0, n, box)))
        if n == 4:
            empty = [f"{c // n + 1} {c % n + 1}" for c, d in enumerate(self.cells) if not d]
            lines.append(f"empty {', '.join(empty) or 'none'}")
        return "\n".join(lines)

    # -- solver --------------------------------------------------------------------------------------------------------

    def random_action(self, rng) -> str:
        """Some digit in some cell that is empty."""
        empty = [c for c, d in enumerate(self.cells) if not d] or [0]
        return self._action(int(rng.choice(empty)), int(rng.integers(1, self.size + 1)))

    def best_actions(self) -> list[str]:
        """Right digits that may be written now; where wrong ones are in their way, clearing those."""
        if self._solved():
            return []
        wanted = [(c, d) for c, d in enumerate(self.solution) if self.cells[c] != d]
        allowed = [self._action(c, d) for c, d in wanted if self._allowed(c, d)]
        return allowed or [self._action(c, 0) for c, _ in wanted if self.cells[c]]

    # -- the grid ------------------------------------------------------------------------------------------------------

    def _draw_puzzle(self) -> bool:
        """One try: a full grid, then digits taken out in random order. False when too many clues are left at the end."""
        n = self.size
        self.solution = next(solutions([0] * n * n, self.np_random))
        cells, left = list(self.solution), n * n
        for c in self.np_random.permutation(n * n):
            if left == self.clues:
                break
            cells[c] = 0
            if len(list(itertools.islice(solutions(cells), 2))) > 1:
                cells[c] = self.solution[c]
            else:
                left -= 1
        self.cells, self.given = cells, frozenset(c for c, d in enumerate(cells) if d)
        return left == self.clues

    def _read(self, text: str) -> tuple[int, int] | None:
        """(cell, digit) of an action, None where the text is none or names a cell that is not on the grid."""
        text = text.strip()
        if match := ACTION.fullmatch(text):
            row, column, digit = map(int, match.groups())
        elif match := SENTENCE.fullmatch(text):
            digit, row, column = map(int, match.groups())
        else:
            return None
        return ((row - 1) * self.size + column - 1, digit) if max(row, column, digit) <= self.size else None

    def _allowed(self, cell, digit) -> bool:
        """Whether a cell is not a clue, and no other cell of its row, column and box holds the digit (0: clears it)."""
        if cell in self.given or digit == 0:
            return cell not in self.given
        places = PLACES[self.size]
        same = [p for p, d in enumerate(self.cells) if d == digit and p != cell]
        return not any(unit in places[p] for p in same for unit in places[cell])

    def _action(self, cell, digit) -> str:
        return f"{cell // self.size + 1} {cell % self.size + 1} {digit}"

    def _solved(self) -> bool:
        return 0 not in self.cells


def solutions(cells: list[int], rng=None) -> Iterator[list[int]]:
    """All ways to fill the empty cells of a grid (none where its digits clash), the cell with the fewest choices first.

    rng: shuffles the digits tried, so that the first solution of an empty grid is a random full grid.
    """
    size = math.isqrt(len(cells))
    cells, places, taken = list(cells), PLACES[size], [0] * (3 * size)  # taken: bit d is set where a unit holds the digit d
    for place, d in zip(places, cells):
        for unit in place:
            if d and taken[unit] >> d & 1:
                return
            taken[unit] |= 1 << d if d else 0

    def fill(empty):
        if not empty:
            yield list(cells)
            return
        free, fewest = 0, size + 1
        for c in empty:
            row, column, box = places[c]
            here = (2 << size) - 2 & ~(taken[row] | taken[column] | taken[box])
            if here.bit_count() < fewest:
                cell, free, fewest = c, here, here.bit_count()
                if fewest < 2:
                    break
        digits = [d for d in range(1, size + 1) if free >> d & 1]
        for d in digits if rng is None else rng.permutation(digits).tolist():
            cells[cell] = d
            for unit in places[cell]:
                taken[unit] ^= 1 << d
            yield from fill([c for c in empty if c != cell])
            for unit in places[cell]:
                taken[unit] ^= 1 << d

    yield from fill([c for c, d in enumerate(cells) if not d])


def _places(size: int) -> list[tuple[int, int, int]]:
    """The units of each cell, numbered on: its row, its column, its box."""
    box = math.isqrt(size)
    rows_columns = [divmod(c, size) for c in range(size * size)]
    return [(r, size + c, 2 * size + r // box * box + c // box) for r, c in rows_columns]


PLACES = {size: _places(size) for size in SIZES}
