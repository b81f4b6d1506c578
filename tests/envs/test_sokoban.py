"""Sokoban: rooms are sound and solvable by an independent search (E2), moves and rewards are the game's."""

import time
from collections import deque

import pytest

from nanoragen.envs.sokoban import Sokoban

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


class Board:
    """The game once more, from the text of an observation alone: sets of (row, column), no code shared with the env."""

    def __init__(self, text):
        rows = [line for line in text.split("\n") if set(line) <= set("#_O√XPS")]
        cells = {(r, c): s for r, row in enumerate(rows) for c, s in enumerate(row)}
        self.size = len(rows), len(rows[0])
        assert all(len(row) == self.size[1] for row in rows)
        self.walls = {p for p, s in cells.items() if s == "#"}
        self.targets = {p for p, s in cells.items() if s in "O√S"}
        self.boxes = {p for p, s in cells.items() if s in "X√"}
        (self.player,) = [p for p, s in cells.items() if s in "PS"]

    def next(self, player, boxes, name):
        (r, c), (dr, dc) = player, MOVES[name]
        to, beyond = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
        if to in self.walls or (to in boxes and (beyond in self.walls or beyond in boxes)):
            return player, boxes
        return to, frozenset(beyond if b == to else b for b in boxes)

    def shortest(self):
        """Moves of a shortest solution, None when there is none."""
        start = (self.player, frozenset(self.boxes))
        found, queue = {start: 0}, deque([start])
        while queue:
            state = queue.popleft()
            if state[1] == self.targets:
                return found[state]
            for name in MOVES:
                after = self.next(*state, name)
                if after not in found:
                    found[after] = found[state] + 1
                    queue.append(after)
        return None


def set_up(rows, **options):
    """An environment put into a drawn position (the solver's map is not used)."""
    board = Board(rows)
    height, width = board.size
    env = Sokoban(height=height, width=width, boxes=len(board.boxes), **options)
    env.reset(seed=0)

    def cells(points):
        return frozenset(r * width + c for r, c in points)

    env.walls, env.targets, env.boxes = cells(board.walls), cells(board.targets), cells(board.boxes)
    env.player, env._moves_left = board.player[0] * width + board.player[1], {}
    return env


def test_e2_500_rooms_are_solved_by_an_independent_search():
    texts, lengths, spent = [], [], 0.0
    for boxes, seeds in ((1, range(400)), (2, range(400, 500))):
        env = Sokoban(boxes=boxes)
        for seed in seeds:
            start = time.perf_counter()
            text, info = env.reset(seed=seed)
            spent += time.perf_counter() - start
            board = Board(text)
            assert board.size == (6, 6) and len(board.boxes) == len(board.targets) == boxes
            assert info == {"success": False, "action_is_valid": True, "action_is_effective": False}
            moves = board.shortest()
            assert moves is not None and env.min_moves <= moves <= env.max_moves, seed
            texts.append(text)
            lengths.append(moves)
            assert env.best_actions(), seed
    assert len(set(texts)) >= 490
    assert set(lengths) == set(range(2, 11))  # every difficulty of the range occurs
    print(f"500 rooms drawn in {spent:.2f} s")  # a property to look at, not to assert


def test_demonstration_is_a_shortest_solution():
    for boxes, seeds in ((1, range(60)), (2, range(20))):
        env = Sokoban(boxes=boxes)
        for seed in seeds:
            want = Board(env.reset(seed=seed)[0]).shortest()
            played = [env.step(action) for action in env.demonstrate()]
            assert len(played) == want and played[-1][2] and played[-1][4]["success"]


def test_best_actions_are_all_first_moves_of_shortest_solutions():
    env = Sokoban()
    for seed in range(60):
        board = Board(env.reset(seed=seed)[0])
        want = board.shortest()
        good = set()
        for name in MOVES:
            after = Board(env.reset(seed=seed)[0])
            after.player, after.boxes = board.next(board.player, frozenset(board.boxes), name)
            if after.shortest() == want - 1:
                good.add(name)
        assert set(env.best_actions()) == good


@pytest.mark.parametrize("height, width", [(5, 5), (5, 10), (10, 5), (7, 8), (10, 10)])
@pytest.mark.parametrize("boxes", [1, 2, 3])
def test_sizes_and_boxes(height, width, boxes):
    env = Sokoban(height=height, width=width, boxes=boxes)
    for seed in range(3):
        board = Board(env.reset(seed=seed)[0])
        assert board.size == (height, width) and len(board.boxes) == len(board.targets) == boxes
        border = {(r, c) for r in range(height) for c in range(width) if r in (0, height - 1) or c in (0, width - 1)}
        assert border <= board.walls
        assert not board.boxes & board.targets and board.player not in board.boxes
        for action in env.demonstrate():
            info = env.step(action)[4]
        assert info["success"]


@pytest.mark.parametrize(
    "key, options",
    [("height", {"height": 4}), ("width", {"width": 11}), ("height", {"height": 6.0}), ("height", {"height": "6"}),
     ("boxes", {"boxes": 0}), ("boxes", {"boxes": 4}), ("observation", {"observation": "pixels"}),
     ("min_moves", {"min_moves": 9, "max_moves": 3}), ("min_moves", {"min_moves": 0})],
)  # fmt: skip
def test_e2_impossible_settings(key, options):
    with pytest.raises(ValueError, match=f"^{key}.*valid: ") as error:
        Sokoban(**options)
    assert "\n" not in str(error.value)


def test_random_play_agrees_with_the_second_implementation():
    """Every observation of 40 random games is what the independent rules give."""
    import random

    rng = random.Random(0)
    for seed in range(40):
        env = Sokoban(boxes=1 + seed % 3, height=6, width=7)
        text, _ = env.reset(seed=seed)
        board = Board(text)
        for _ in range(20):
            name = rng.choice(list(MOVES))
            before = len(board.boxes & board.targets)
            moved = board.next(board.player, frozenset(board.boxes), name)
            changed = moved != (board.player, frozenset(board.boxes))
            board.player, board.boxes = moved[0], set(moved[1])
            text, reward, solved, _, info = env.step(name)
            now = Board(text)
            assert (now.player, now.boxes, now.targets, now.walls) == (
                board.player,
                board.boxes,
                board.targets,
                board.walls,
            )
            assert info["action_is_effective"] == changed and solved == (board.boxes == board.targets)
            assert reward == pytest.approx(-0.1 + len(board.boxes & board.targets) - before + (10 if solved else 0))
            if solved:
                break


ROOM = "######\n#P___#\n#_X_O#\n#____#\n#____#\n######"


def test_rewards_of_a_solved_game():
    env = set_up(ROOM)
    rewards = [env.step(a)[1] for a in ("Down", "Right", "Right")]
    assert rewards == pytest.approx([-0.1, -0.1, -0.1 + 1 + 10])
    assert env.render().split("\n")[2] == "#__P√#"


def test_a_box_pushed_on_and_off():
    env = set_up("######\n#_P__#\n#OX__#\n#O_X_#\n#____#\n######")
    env.player = 2 * 6 + 3
    assert env.step("Left")[1] == pytest.approx(-0.1 + 1)
    env.player = 1 * 6 + 1  # above the box on its target: down pushes it onto the other target, up is a wall
    assert env.step("Down")[1] == pytest.approx(-0.1 - 1 + 1)
    assert env.step("Down")[1] == pytest.approx(-0.1 - 1)


def test_pushes_that_do_nothing():
    env = set_up("#######\n#_PXX_#\n#XO__O#\n#__O__#\n#######")
    for name in ("Right", "Up"):  # two boxes in a row; a wall
        before = env.render()
        text, reward, _, _, info = env.step(name)
        assert text == before and reward == -0.1 and info["action_is_valid"] and not info["action_is_effective"]


def test_symbols():
    env = set_up("#####\n#P_X#\n#_O_#\n#___#\n#####")
    env.player = 2 * 5 + 2
    assert env.render().split("\n")[2] == "#_S_#"
    env.player, env.boxes = 5 + 1, frozenset({2 * 5 + 2})
    assert env.render().split("\n")[1:3] == ["#P__#", "#_√_#"]


def test_observation_forms_describe_the_same_room():
    forms = {form: Sokoban(observation=form) for form in ("grid", "coordinates", "both")}
    for seed in range(20):
        grid, coordinates, both = (forms[f].reset(seed=seed)[0] for f in ("grid", "coordinates", "both"))
        board = Board(grid)
        row, column = board.player

        def say(points):  # from the player: rows down, columns right
            return " ".join(f"{r - row:+d},{c - column:+d}" for r, c in sorted(points))

        start = (board.player, frozenset(board.boxes))
        free = " ".join(name.lower() for name in MOVES if board.next(*start, name) != start)
        line = f"box {say(board.boxes)} target {say(board.targets)} free {free or 'none'}"
        inner = {(r, c) for r, c in board.walls if 0 < r < 5 and 0 < c < 5}
        assert both == f"{grid}\n{line}"
        assert coordinates == f"{line}\nplayer {row},{column} of 6,6 walls {say(inner) or 'none'}"


def test_search_takes_over_outside_the_map_and_gives_up_when_lost():
    env = set_up(ROOM)
    assert env.best_actions() == []
    actions = []
    for action in env.demonstrate():
        actions.append(action)
        info = env.step(action)[4]
    assert len(actions) == Board(ROOM).shortest() and info["success"]
    lost = set_up("######\n#X_P_#\n#____#\n#__O_#\n#____#\n######")
    assert Board("######\n#X_P_#\n#____#\n#__O_#\n#____#\n######").shortest() is None
    assert list(lost.demonstrate()) == []
