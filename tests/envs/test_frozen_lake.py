"""FrozenLake: maps from the seed (E4), slipping and action names (E5), shortest safe paths by an independent search."""

from collections import Counter, deque

import numpy as np
import pytest

from nanoragen.envs.frozen_lake import FrozenLake

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
INTERIOR = 2 * 5 + 2  # the middle of a 5x5 lake without holes
OPEN = {"size": 5, "frozen": 1.0}


def distances(grid):
    """Moves from every cell to the goal, holes avoided, from the text of an observation alone."""
    size = len(grid)
    goal = next((r, c) for r in range(size) for c in range(size) if grid[r][c] in "G√")
    found, queue = {goal: 0}, deque([goal])
    while queue:
        r, c = queue.popleft()
        for dr, dc in MOVES.values():
            cell = (r + dr, c + dc)
            if 0 <= cell[0] < size and 0 <= cell[1] < size and grid[cell[0]][cell[1]] != "O" and cell not in found:
                found[cell] = found[r, c] + 1
                queue.append(cell)
    return found


def at(grid, symbol):
    return next((r, row.index(symbol)) for r, row in enumerate(grid) if symbol in row)


def test_e4_maps_come_from_the_seed_and_vary():
    np.random.seed(0)
    before = np.random.get_state()[1].tobytes()
    env, maps = FrozenLake(random_start=False), set()
    for seed in range(100):
        text, _ = env.reset(seed=seed)
        grid = text.split("\n")[:-1]
        assert env.reset(seed=seed)[0] == text
        assert [len(row) for row in grid] == [4] * 4 and at(grid, "P") == (0, 0) and at(grid, "G") == (3, 3)
        assert (0, 0) in distances(grid), "no path"
        maps.add(text)
    assert len(maps) >= 95
    assert np.random.get_state()[1].tobytes() == before


def test_random_start_has_a_path_and_is_not_the_goal():
    env, starts = FrozenLake(), Counter()
    for seed in range(400):
        text, _ = env.reset(seed=seed)
        grid = text.split("\n")[:-1]
        starts[at(grid, "P")] += 1
        assert distances(grid)[at(grid, "P")] >= 1
    assert len(starts) == 15  # every cell but the goal


@pytest.mark.parametrize("size", [4, 6])
def test_demonstration_is_a_shortest_safe_path(size):
    env = FrozenLake(size=size)
    for seed in range(100):
        text, _ = env.reset(seed=seed)
        grid = text.split("\n")[:-1]
        want, path = distances(grid)[at(grid, "P")], []
        for action in env.demonstrate():
            path.append(action)
            _, reward, terminated, _, info = env.step(action)
            assert reward == float(terminated) == float(info["success"])
        assert info["success"] and len(path) == want


def test_best_actions_are_all_moves_that_get_nearer():
    env = FrozenLake()
    for seed in range(200):
        grid = env.reset(seed=seed)[0].split("\n")[:-1]
        (r, c), left = at(grid, "P"), distances(grid)
        nearer = {n for n, (dr, dc) in MOVES.items() if left.get((r + dr, c + dc)) == left[r, c] - 1}
        assert set(env.best_actions()) == nearer


def test_every_4x4_start_is_within_the_ten_moves_of_an_episode():
    """All 2^14 maps: the farthest any start is from the goal, by a search over bit sets of cells."""
    left, right = 0x1111, 0x8888  # columns 0 and 3; bit 4 * row + column
    farthest = 0
    for holes in range(1 << 14):
        ice = ~(holes << 1) & 0xFFFF
        seen, edge, steps = 1 << 15, 1 << 15, -1
        while edge:
            steps += 1
            edge = (edge << 4 | edge >> 4 | (edge & ~right) << 1 | (edge & ~left) >> 1) & ice & ~seen
            seen |= edge
        if seen & 1:  # gymnasium keeps only maps with a path from the corner
            farthest = max(farthest, steps)
    assert farthest == FrozenLake.max_turns * FrozenLake.max_actions_per_turn == 10


@pytest.mark.parametrize("rate", [1 / 3, 0.8])
@pytest.mark.parametrize("action", list(MOVES))
def test_e5_slipping(rate, action):
    env = FrozenLake(is_slippery=True, success_rate=rate, **OPEN)
    env.reset(seed=0)
    counts, n = Counter(), 5_000  # four names: 20,000 moves a rate
    for _ in range(n):
        env.position = INTERIOR
        env.step(action)
        counts[env.position // 5 - 2, env.position % 5 - 2] += 1
    wanted = MOVES[action]
    beside = [m for m in MOVES.values() if m[0] * wanted[0] + m[1] * wanted[1] == 0]
    assert set(counts) == {wanted, *beside}  # never the opposite, never in place
    assert abs(counts[wanted] / n - rate) < 0.025
    assert all(abs(counts[m] / n - (1 - rate) / 2) < 0.025 for m in beside)


@pytest.mark.parametrize("rate", [1 / 3, 0.8])
def test_e5_slip_table_is_exact(rate):
    env = FrozenLake(is_slippery=True, success_rate=rate, **OPEN)
    env.reset(seed=0)
    for i, (name, (dr, dc)) in enumerate(MOVES.items()):
        chance = Counter()
        for p, cell, _, _ in env.transitions[INTERIOR][i]:
            chance[cell] += p
        assert chance[INTERIOR + 5 * dr + dc] == pytest.approx(rate), name
        assert sorted(chance.values()) == pytest.approx(sorted([rate, (1 - rate) / 2, (1 - rate) / 2]))
        assert INTERIOR - 5 * dr - dc not in chance


def test_e5_names_move_the_right_way_on_firm_ice():
    env = FrozenLake(**OPEN)
    env.reset(seed=0)
    for name, (dr, dc) in MOVES.items():
        for _ in range(20):
            env.position = INTERIOR
            text, reward, over, _, info = env.step(name)
            assert at(text.split("\n")[:-1], "P") == (2 + dr, 2 + dc)
            assert (reward, over, info["action_is_valid"], info["action_is_effective"]) == (0.0, False, True, True)
        env.position = 0 if dr + dc < 0 else 4 if dc else 20  # a border that the move runs into
        before = env.render()
        text, *_, info = env.step(name)
        assert text == before and info["action_is_valid"] and not info["action_is_effective"]


def test_symbols_coordinates_and_ends():
    env = FrozenLake()
    env.reset(seed=0)
    hole = min(h for h in env.holes)
    r, c = divmod(hole, 4)
    beside = [(n, r - dr, c - dc) for n, (dr, dc) in MOVES.items() if 0 <= r - dr < 4 and 0 <= c - dc < 4]
    name, pr, pc = next((n, a, b) for n, a, b in beside if 4 * a + b not in env.holes | {env.goal})
    env.position = 4 * pr + pc
    assert at(env.render().split("\n")[:-1], "P") == (pr, pc)
    text, reward, over, truncated, info = env.step(name)
    assert text.split("\n")[r][c] == "X" and "P" not in text
    assert (reward, over, truncated, info["success"]) == (0.0, True, False, False)
    drowned = env.render()
    for other in MOVES:  # nothing moves any more
        assert env.step(other)[:3] == (drowned, 0.0, True)
    env = FrozenLake(**OPEN)
    env.reset(seed=0)
    assert env.render().endswith("holes beside you none")
    env.position = env.goal - 1
    text, reward, over, _, info = env.step("right")
    assert text.split("\n")[4][4] == "√" and (reward, over, info["success"]) == (1.0, True, True)
    assert env.step("left")[1] == 0.0  # the goal pays once


def test_last_line_says_where_the_goal_is_and_which_neighbours_are_holes():
    env = FrozenLake()
    for seed in range(100):
        *grid, line = env.reset(seed=seed)[0].split("\n")
        (r, c), beside = at(grid, "P"), set()
        for name, (dr, dc) in MOVES.items():
            if 0 <= r + dr < 4 and 0 <= c + dc < 4 and grid[r + dr][c + dc] == "O":
                beside.add(name.lower())
        said = line.split(" holes beside you ")
        assert said[0] == f"goal {3 - r:+d},{3 - c:+d}"
        assert (set() if said[1] == "none" else set(said[1].split())) == beside


def test_slippery_policy_mostly_wins_and_slips_come_from_the_seed():
    env = FrozenLake(is_slippery=True, success_rate=0.8)
    wins = []
    for _ in range(2):
        won = 0
        for seed in range(60):
            env.reset(seed=seed)
            for step, action in enumerate(env.demonstrate()):
                info = env.step(action)[4]
                if step == 99:
                    break
            won += info["success"]
        wins.append(won)
    assert wins[0] == wins[1] >= 40


@pytest.mark.parametrize(
    "key, options",
    [("size", {"size": 2}), ("size", {"size": 11}), ("size", {"size": "4"}), ("success_rate", {"success_rate": 0}),
     ("success_rate", {"success_rate": "x"}), ("frozen", {"frozen": 0.2}), ("frozen", {"frozen": float("nan")})],
)  # fmt: skip
def test_impossible_options(key, options):
    with pytest.raises(ValueError, match=f"^{key}: .*valid: "):
        FrozenLake(**options)
