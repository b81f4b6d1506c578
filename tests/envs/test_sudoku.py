"""Sudoku: puzzles with one solution (counted by exhaustion and by exact cover), rules, spellings, a solver that repairs."""

import itertools
import random

import pytest

from nanoragen.envs.sudoku import Sudoku, solutions

# A puzzle and its solution as printed in many introductions to the game.
KNOWN = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def digits(text):
    return [int(c) for c in text]


def valid(cells, size):
    """Every row, column and box holds 1 to size: written out from the rules, over whole units."""
    box = int(size**0.5)
    rows = [cells[r * size : (r + 1) * size] for r in range(size)]
    boxes = [[rows[r + i][c + j] for i in range(box) for j in range(box)]
             for r in range(0, size, box) for c in range(0, size, box)]  # fmt: skip
    return all(sorted(unit) == list(range(1, size + 1)) for unit in [*rows, *zip(*rows), *boxes])


def all_small_grids():
    """Every 4x4 grid, from pairs of rows with good boxes."""
    rows = itertools.permutations(range(1, 5))
    halves = [a + b for a, b in itertools.product(rows, repeat=2) if len({*a[:2], *b[:2]}) == len({*a[2:], *b[2:]}) == 4]
    return [cells for a, b in itertools.product(halves, repeat=2) if valid(cells := [*a, *b], 4)]


SMALL = all_small_grids()


def exact_covers(cells):
    """Number of solutions of a 9x9 grid by exact cover (Knuth's algorithm X): shares nothing with the solver."""
    choices = {}
    for r, c, d in itertools.product(range(9), range(9), range(1, 10)):
        if cells[9 * r + c] in (0, d):
            choices[r, c, d] = [("cell", r, c), ("row", r, d), ("column", c, d), ("box", r // 3, c // 3, d)]
    columns = {}
    for choice, needs in choices.items():
        for need in needs:
            columns.setdefault(need, set()).add(choice)
    if len(columns) < 4 * 81:
        return 0

    def count(columns):
        if not columns:
            return 1
        need = min(columns, key=lambda n: len(columns[n]))
        total = 0
        for choice in columns[need]:
            gone = set().union(*(columns[n] for n in choices[choice]))
            total += count({n: s - gone for n, s in columns.items() if n not in choices[choice]})
        return total

    return count(columns)


def board(text, size=4):
    """An environment on a given grid, all of whose digits are clues."""
    env = Sudoku(size=size)
    env.reset(seed=0)
    env.cells = digits(text)
    env.given = frozenset(c for c, d in enumerate(env.cells) if d)
    env.solution = next(solutions(env.cells))
    return env


def test_solver_finds_all_288_small_grids():
    assert len(SMALL) == 288
    assert sorted(solutions([0] * 16)) == sorted(SMALL)


def test_solver_on_a_known_puzzle_and_on_clashing_clues():
    assert list(solutions(digits(KNOWN))) == [digits(SOLVED)]
    assert list(solutions(digits("55" + KNOWN[2:]))) == []
    two = [0 if d in (1, 2) else d for d in SMALL[0]]  # 1 and 2 may be exchanged, so at least two
    assert sorted(solutions(two)) == sorted(g for g in SMALL if all(a in (0, b) for a, b in zip(two, g)))


@pytest.mark.parametrize("clues", [4, 8, 12, 15])
def test_small_puzzles_have_the_clues_asked_for_and_one_solution(clues):
    env = Sudoku(clues=clues)
    for seed in range(60):
        env.reset(seed=seed)
        fitting = [g for g in SMALL if all(a in (0, b) for a, b in zip(env.cells, g))]
        assert fitting == [env.solution] and sum(map(bool, env.cells)) == clues


@pytest.mark.parametrize("clues", [26, 36])
def test_large_puzzles_have_one_solution(clues):
    env = Sudoku(size=9, clues=clues)
    for seed in range(3):
        env.reset(seed=seed)
        assert exact_covers(env.cells) == 1 and sum(map(bool, env.cells)) == clues
        assert valid(env.solution, 9) and all(a in (0, b) for a, b in zip(env.cells, env.solution))


def test_full_grids_vary_in_more_than_their_digits():
    env, shapes = Sudoku(), set()
    for seed in range(200):
        env.reset(seed=seed)
        order = {d: i for i, d in enumerate(dict.fromkeys(env.solution))}
        shapes.add(tuple(order[d] for d in env.solution))
    assert len(shapes) == 288 // 24  # all grids up to renaming the digits


def test_rendering_is_compact():
    assert board("3014143021434321").render() == "3.|14\n14|3.\n--+--\n21|43\n43|21\nempty 1 2, 2 4"
    lines = board(KNOWN, 9).render().split("\n")
    assert lines[:4] == ["53.|.7.|...", "6..|195|...", ".98|...|.6.", "---+---+---"] and len(lines) == 11


@pytest.mark.parametrize(
    "action", ["1 2 2", "1,2,2", " 1, 2, 2 ", "1\t2  2", "place 2 at row 1 col 2", "Place 2 in row 1, column 2"]
)
def test_spellings(action):
    env = board("3014143021434321")
    _, reward, terminated, _, info = env.step(action)
    assert env.cells == digits("3214143021434321") and (reward, terminated) == (0.0, False)
    assert info == {"success": False, "action_is_valid": True, "action_is_effective": True}


@pytest.mark.parametrize(
    "action",
    [
        "1 2 1",
        "1 2 3",
        "1 2 4",  # in the row or the column already
        "2 4 3",
        "2 4 1",  # in the column and the box
        "1 1 2",
        "1 1 3",
        "1 1 0",
        "4 4 1",  # clues stay
        "5 1 1",
        "1 5 1",
        "1 2 5",
        "0 1 1",
        "1 0 1",
        "1 2 -2",
        "1 2",
        "1 2 2 2",
        "122",
        "1 2 2 or 1 2 3",
        "1 2 ２",
        "1 2 2.0",
    ],
)
def test_illegal_moves_leave_the_grid(action):
    env = board("3014143021434321")
    before = list(env.cells), env.render()
    text, reward, terminated, _, info = env.step(action)
    assert (env.cells, text) == before and (reward, terminated) == (0.0, False)
    assert info == {"success": False, "action_is_valid": False, "action_is_effective": False}


def test_any_valid_completion_counts():
    """A grid with several solutions, filled otherwise than the one the environment has in mind."""
    clues = [d if d in (1, 2) else 0 for d in SMALL[0]]
    ways = list(solutions(clues))
    assert len(ways) > 1
    for way in ways:
        env = board("".join(map(str, clues)))
        for c, d in enumerate(way):
            if not clues[c]:
                _, reward, terminated, _, info = env.step(f"{c // 4 + 1} {c % 4 + 1} {d}")
        assert (reward, terminated, info["success"]) == (1.0, True, True) and valid(env.cells, 4)


def test_reward_is_paid_once():
    env = board("3014143021434321")
    assert [env.step(a)[1:3] for a in ("1 2 2", "2 4 2")] == [(0.0, False), (1.0, True)]
    for action in ("2 4 2", "2 4 0", "1 2 0"):
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["success"], info["action_is_valid"]) == (0.0, True, True, False)


@pytest.mark.parametrize("size, clues", [(4, 5), (4, 12), (9, 30)])
def test_full_grids_are_right_and_the_solver_repairs_whatever_was_played(size, clues):
    env, rng = Sudoku(size=size, clues=clues), random.Random(0)
    for seed in range(20):
        env.reset(seed=seed)
        for _ in range(2 * size):
            env.step(f"{rng.randint(1, size)} {rng.randint(1, size)} {rng.randint(0, size)}")
        for action in env.demonstrate():
            _, _, terminated, _, info = env.step(action)
            assert info["action_is_effective"]
        assert env._solved() and valid(env.cells, size)


def test_turns_suffice_for_the_blanks():
    for options in ({}, {"clues": 4}, {"size": 9}, {"size": 9, "clues": 24}):
        env = Sudoku(**options)
        blanks = env.size**2 - env.clues
        assert blanks <= (env.max_turns - 1) * env.max_actions_per_turn < blanks + env.max_actions_per_turn
        assert f"at most {env.max_actions_per_turn} a turn" in env.instruction


@pytest.mark.parametrize(
    "options", [{"size": 6}, {"size": "4"}, {"clues": 3}, {"clues": 16}, {"clues": 4.5}, {"size": 9, "clues": 23}, {"size": 4.0}]
)
def test_impossible_options(options):
    with pytest.raises(ValueError, match="^(size|clues): .*valid: "):
        Sudoku(**options)
