"""2048: merges worked out by hand, tiles that appear as they should, the end of the game, rewards."""

import math
from collections import Counter

import numpy as np
import pytest

from nanoragen.envs.game_2048 import Game2048, slid, slid_left


def game(*rows, target=64):
    env = Game2048(target=target)
    env.reset(seed=0)
    env.board = tuple(tuple(row) for row in rows)
    return env


@pytest.mark.parametrize(
    "line, want, points",
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), 0),
        ((0, 2, 0, 4), (2, 4, 0, 0), 0),
        ((2, 2, 0, 0), (4, 0, 0, 0), 4),
        ((2, 0, 0, 2), (4, 0, 0, 0), 4),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),  # the pair nearer to the wall
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),  # not 8: a new tile merges no more
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),  # nor does it merge with the tile it comes to stand beside
        ((2, 2, 4, 0), (4, 4, 0, 0), 4),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
        ((8, 0, 8, 16), (16, 16, 0, 0), 16),
        ((4, 4, 8, 8), (8, 16, 0, 0), 24),
    ],
)
def test_a_line(line, want, points):
    assert slid_left(line) == (want, points)


BOARD = ((2, 0, 2, 4), (2, 0, 0, 4), (4, 8, 0, 4), (0, 8, 2, 4))


@pytest.mark.parametrize(
    "action, want, points",
    [
        ("Left", ((4, 4, 0, 0), (2, 4, 0, 0), (4, 8, 4, 0), (8, 2, 4, 0)), 4),
        ("Right", ((0, 0, 4, 4), (0, 0, 2, 4), (0, 4, 8, 4), (0, 8, 2, 4)), 4),
        ("Up", ((4, 16, 4, 8), (4, 0, 0, 8), (0, 0, 0, 0), (0, 0, 0, 0)), 40),
        ("Down", ((0, 0, 0, 0), (0, 0, 0, 0), (4, 0, 0, 8), (4, 16, 4, 8)), 40),
    ],
)
def test_a_board(action, want, points):
    assert slid(BOARD, action) == (want, points)


@pytest.mark.parametrize("action", ["Left", "Up", "down", " RIGHT "])
def test_a_move_then_one_new_tile_and_its_reward(action):
    env = game(*BOARD)
    want, points = slid(BOARD, action.strip().capitalize())
    _, reward, terminated, _, info = env.step(action)
    changed = [(a, b) for old, new in zip(want, env.board) for a, b in zip(old, new) if a != b]
    assert len(changed) == 1 and changed[0] in ((0, 2), (0, 4)) and not terminated
    assert reward == pytest.approx(0.1 * math.log2(1 + points))
    assert info == {"success": False, "action_is_valid": True, "action_is_effective": True}


def test_a_move_that_changes_nothing_makes_no_tile_appear():
    rows = (2, 4, 8, 16), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)
    env, moved = game(*rows), game(*rows)
    for action in ("Up", "Left", "Right", "Up"):
        text, reward, terminated, _, info = env.step(action)
        assert env.board == rows and (reward, terminated) == (0.0, False)
        assert info == {"success": False, "action_is_valid": True, "action_is_effective": False}
        assert text == "2 4 8 16\n. . . .\n. . . .\n. . . .\nmake 64, moves down"
    assert env.step("Down") == moved.step("Down")  # and no luck was used up


def test_tiles_appear_anywhere_nine_in_ten_a_two():
    env, tiles, cells = Game2048(), Counter(), Counter()
    for seed in range(3_000):
        env.reset(seed=seed)
        found = [(r, c, t) for r, row in enumerate(env.board) for c, t in enumerate(row) if t]
        assert len(found) == 2
        tiles.update(t for _, _, t in found)
        cells.update((r, c) for r, c, _ in found)
    assert set(tiles) == {2, 4} and abs(tiles[2] / 6_000 - 0.9) < 0.012  # three standard errors
    assert len(cells) == 16 and max(abs(n / 6_000 - 1 / 16) for n in cells.values()) < 0.01


def test_luck_comes_from_the_environments_own_generator():
    def play():
        env = Game2048()
        env.reset(seed=11)
        return [env.step(a)[0] for a in ("Left", "Up", "Right", "Down") * 3]

    np.random.seed(0)
    first = play()
    np.random.seed(1)
    assert play() == first and len(set(first)) == 12


def test_the_target_wins_and_ends_the_game():
    env = game((32, 32, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 2))
    _, reward, terminated, _, info = env.step("Left")
    assert terminated and info["success"] and reward == pytest.approx(10 + 0.1 * math.log2(65))
    board = env.board
    _, reward, terminated, _, info = env.step("Right")
    assert env.board == board and (reward, terminated, info["success"]) == (0.0, True, True)


def test_a_full_board_without_equal_neighbours_is_lost():
    rows = (2, 4, 2, 4), (4, 2, 4, 2), (2, 4, 2, 4), (4, 2, 4, 0)
    assert not game(*rows)._over() and not game(*rows[:3], (4, 2, 2, 4))._over()
    env = game(*rows[:3], (4, 2, 4, 2))
    text, reward, terminated, _, info = env.step("Up")
    assert terminated and not info["success"] and reward == 0.0 and text.endswith("moves none")
    assert env.best_actions() == [] and list(env.demonstrate()) == []


def test_expectimax_takes_the_move_that_keeps_the_game_alive():
    """Full but for one pair: only Left and Right change anything."""
    env = game((2, 4, 8, 16), (4, 8, 16, 32), (2, 4, 8, 16), (8, 8, 2, 4))
    assert env.best_actions() in (["Left"], ["Right"])
    env = game((32, 0, 0, 0), (32, 0, 0, 0), (2, 4, 0, 0), (4, 2, 0, 0))
    assert env.best_actions() in (["Up"], ["Down"])  # 64 is on the table


@pytest.mark.parametrize("target", [16, 32, 128])
def test_other_targets_can_be_reached_in_their_turns(target):
    env, won = Game2048(target=target), 0
    for seed in range(20):
        env.reset(seed=seed)
        moves = 0
        for action in env.demonstrate():
            info, moves = env.step(action)[4], moves + 1
        won += info["success"] and moves <= env.max_turns * env.max_actions_per_turn
    assert won >= 19


@pytest.mark.parametrize("target", [0, 4, 24, 4096, 64.5, "64", None])
def test_impossible_options(target):
    with pytest.raises(ValueError, match="^target: .*valid: 8, 16"):
        Game2048(target=target)
