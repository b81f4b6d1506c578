"""Rubik's cube, 2x2: turn the upper, right and front faces until each face has one colour. Reward 1 then, 0 otherwise (RAGEN's).

A 2x2 cube has no centres, so turning the lower face is turning the upper one and holding the cube differently. With the corner
at the back, bottom and left held still, three faces reach all 3,674,160 positions, each at most 11 turns from the solved one
(half turns count as one turn).

The turns are not typed in as tables: a sticker is a place and a direction in space, and a turn rotates both.

Left out: turns of the other three faces (RAGEN has them, and no half turns), and the 3x3 cube.
"""

import functools
import itertools

import numpy as np

from nanoragen.envs.base import Game, check_whole

# face -> (outward direction, direction of reading, direction of its lower row), in x right, y up, z towards you: the unfolded net
FACES = {
    "U": ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "L": ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "F": ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
    "R": ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
    "B": ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
    "D": ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
}
SOLVED = "".join(colour * 4 for colour in "WOGRBY")  # RAGEN's colours: white, orange, green, red, blue, yellow
KNOWN_DEPTH = 5  # turns to which the positions around the solved one are listed: 12,224 of them
PRIMES = str.maketrans("’′`", "'''")


class RubiksCube(Game):
    """
    scramble   turns that mix the cube, 1 to 20, never two of one face in a row

    State: `stickers`, 24 colours, face by face in the order of FACES, each read like a page.
    """

    actions = ("U", "U'", "U2", "R", "R'", "R2", "F", "F'", "F2")
    max_turns = 3  # of the default scramble: twice the actions that undo it
    max_actions_per_turn = 2
    instruction = (
        "You solve a 2x2 Rubik's cube: one colour on each face. Faces are read row by row. Actions: U U' U2 R R' R2 F F' F2 "
        "(up, right, front: clockwise, ' counterclockwise, 2 half), at most 2 a turn. "
        "Reply <think>your reasoning</think><answer>R || U'</answer>"
    )

    def __init__(self, scramble=3):
        super().__init__()
        check_whole("rubiks_cube", 1, 20, scramble=scramble)
        self.scramble = scramble
        self.max_turns = min(scramble, 11)

    def _start(self, seed):
        self.stickers = SOLVED
        while self.stickers == SOLVED:  # a long scramble may undo itself
            last = ""
            for _ in range(self.scramble):
                last = str(self.np_random.choice([a for a in self.actions if a[0] != last[:1]]))
                self.stickers = turned(self.stickers, last)

    def step(self, action):
        name = str(action).strip().translate(PRIMES).upper()
        valid = name in self.actions and self.stickers != SOLVED
        if valid:
            self.stickers = turned(self.stickers, name)
        solved = self.stickers == SOLVED
        return self._result(solved and valid, solved, solved, valid)

    def render(self):
        return "\n".join(
            f"{f} {self.stickers[4 * i : 4 * i + 2]}/{self.stickers[4 * i + 2 : 4 * i + 4]}" for i, f in enumerate(FACES)
        )

    def best_actions(self) -> list[str]:
        """All first turns of shortest solutions: breadth first from here, until the positions near the solved one are met."""
        near = _near_solved()
        if self.stickers in near:
            closer = near[self.stickers] - 1
            return [a for a in self.actions if near.get(turned(self.stickers, a)) == closer]
        seen, level = {self.stickers}, {turned(self.stickers, a): {a} for a in self.actions}  # position -> its first turns
        while not (met := [level[s] for s in level if s in near]):
            seen.update(level)
            after = {}
            for stickers, first in level.items():
                for a in self.actions:
                    if (to := turned(stickers, a)) not in seen:
                        after.setdefault(to, set()).update(first)
            level = after
        return [a for a in self.actions if a in set().union(*met)]


def turned(stickers: str, action: str) -> str:
    """The 24 stickers after a turn ("R", "R'", "R2")."""
    return "".join([stickers[i] for i in TURNS[action]])


def _quarter(face: str) -> list[int]:
    """Which sticker moves to each of the 24 places when a face is turned clockwise, as seen from outside."""
    places = [(tuple(np.add(out, np.add(np.multiply(right, 2 * j - 1), np.multiply(down, 2 * i - 1))).tolist()), out)
              for out, right, down in FACES.values() for i, j in itertools.product((0, 1), repeat=2)]  # fmt: skip
    axis = FACES[face][0]

    def turn(v):  # by -90 degrees about the axis
        return tuple((np.cross(v, axis) + np.multiply(axis, np.dot(axis, v))).tolist())

    source = list(range(24))
    for i, (corner, out) in enumerate(places):
        if np.dot(corner, axis) > 0:
            source[places.index((turn(corner), turn(out)))] = i
    return source


def _turns() -> dict[str, list[int]]:
    found = {}
    for face in "URF":
        once = _quarter(face)
        twice = [once[i] for i in once]
        found |= {face: once, f"{face}'": [once[i] for i in twice], f"{face}2": twice}
    return found


TURNS = _turns()


@functools.cache
def _near_solved() -> dict[str, int]:
    """Position -> turns to the solved one, for all within KNOWN_DEPTH. A position's inverse turns are turns too."""
    distance, level = {SOLVED: 0}, [SOLVED]
    for depth in range(1, KNOWN_DEPTH + 1):
        new = {turned(s, a) for s in level for a in TURNS}
        level = sorted(new.difference(distance))
        distance.update(dict.fromkeys(level, depth))
    return distance
