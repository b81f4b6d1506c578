"""2048: slide the tiles; equal ones that meet become one. The game is won when the target tile is on the board.

The original's rules: every move slides all tiles, a tile that was made by a move merges no more in that move, the pair nearer
to the wall merges first, and then a 2 (nine times in ten) or a 4 appears on a random empty cell. A move that changes nothing
is not made, and nothing appears. The game is lost when no move changes anything.

Reward: 0.1 log2(1 + points) a move (RAGEN's), where a merge gives the new tile's value in points; and 10 for the target, so
that winning early is better than gathering points for longer.

Left out: other board sizes, and going on after the target.
"""

import functools
import math

from nanoragen.envs.base import Game

ROOM = 9  # empty cells; with more of them the solver does not look ahead, which makes it four times as fast and hardly worse
LOST = -1_000.0  # value of a board without moves to the solver, below that of any other


class Game2048(Game):
    """
    target   the tile to reach: 8, 16, 32, ... 2048. The turns grow with it: about two moves for three of its value, where good
             play needs one for two.

    State: `board`, four rows of four, 0 where empty. The tiles that appear come from the seed.
    """

    actions = ("Up", "Down", "Left", "Right")
    max_turns = 12  # of the default target
    max_actions_per_turn = 4
    instruction = (
        "You play 2048: slide all tiles; two equal tiles that meet become their sum. After each move a 2 or a 4 appears. "
        "Actions: Up, Down, Left, Right, at most 4 a turn. "
        "Reply <think>your reasoning</think><answer>Left || Down</answer>"
    )

    def __init__(self, target=64):
        super().__init__()
        if target not in [2**n for n in range(3, 12)]:
            raise ValueError(f"target: {target!r} is not possible in game_2048; valid: 8, 16, 32, ... 2048")
        self.target = target
        self.max_turns = target // 6 + 2

    def _start(self, seed):
        self.board = ((0,) * 4,) * 4
        self._appear()
        self._appear()

    def step(self, action):
        name = str(action).strip().capitalize()
        valid, over = name in self.actions, self._over()
        board, points = slid(self.board, name) if valid and not over else (self.board, 0)
        effective = board != self.board
        if effective:
            self.board = board
            self._appear()
        won = self._won()
        reward = 0.1 * math.log2(1 + points) + (10.0 if won and effective else 0.0)
        return self._result(reward, self._over(), won, valid, effective)

    def render(self):
        lines = [" ".join(str(tile or ".") for tile in row) for row in self.board]
        moves = [a.lower() for a in self.actions if slid(self.board, a)[0] != self.board]
        return "\n".join([*lines, f"make {self.target}, moves {' '.join(moves) or 'none'}"])

    def best_actions(self) -> list[str]:
        """The move that promises most, looking at this move, the tile that appears, and the next move (expectimax)."""
        if self._over():
            return []
        promise = {a: points + _expected(board) for a in self.actions
                   for board, points in [slid(self.board, a)] if board != self.board}  # fmt: skip
        return [max(promise, key=promise.get)]

    def _appear(self):
        cells = _empty(self.board)
        row, column = cells[self.np_random.integers(len(cells))]
        self.board = _put(self.board, row, column, 2 if self.np_random.random() < 0.9 else 4)

    def _won(self) -> bool:
        return max(map(max, self.board)) >= self.target

    def _over(self) -> bool:
        return self._won() or all(slid(self.board, a)[0] == self.board for a in self.actions)


def slid(board, action: str):
    """(board, points) after a move, before a tile appears."""
    across = action in ("Up", "Down")  # then columns are slid as rows are
    back = action in ("Down", "Right")
    lines = list(zip(*board)) if across else board
    done = [slid_left(line[::-1] if back else line) for line in lines]
    lines = [line[::-1] if back else line for line, _ in done]
    return tuple(zip(*lines)) if across else tuple(lines), sum(points for _, points in done)


@functools.cache
def slid_left(line: tuple) -> tuple[tuple, int]:
    """One line pushed to its start, and the points of its merges."""
    tiles, points = [], 0
    merged = True  # whether the last tile may merge no more
    for tile in filter(None, line):
        if not merged and tiles[-1] == tile:
            tiles[-1], merged = 2 * tile, True
            points += 2 * tile
        else:
            tiles.append(tile)
            merged = False
    return (*tiles, *(0,) * (len(line) - len(tiles))), points


# -- solver ------------------------------------------------------------------------------------------------------------


def _expected(board) -> float:
    """Mean over the cells in which a 2 may appear of what the best next move is worth; no look ahead while there is room."""
    cells = _empty(board)
    if len(cells) > ROOM:
        return _promise(board)
    return sum(_best(_put(board, row, column, 2)) for row, column in cells) / len(cells)


def _best(board) -> float:
    moves = [slid(board, a) for a in Game2048.actions]
    return max((points + _promise(after) for after, points in moves if after != board), default=LOST)


def _promise(board) -> float:
    """What a board is worth besides points: room, and equal tiles that stand side by side."""
    return len(_empty(board)) + sum(map(_beside, board)) + sum(map(_beside, zip(*board)))


@functools.cache
def _beside(line: tuple) -> float:
    return sum(a for a, b in zip(line, line[1:]) if a == b) / 2


def _empty(board) -> list[tuple[int, int]]:
    return [(r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if not tile]


def _put(board, row, column, tile):
    line = board[row]
    return (*board[:row], (*line[:column], tile, *line[column + 1 :]), *board[row + 1 :])
