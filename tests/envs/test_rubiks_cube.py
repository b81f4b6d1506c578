"""Rubik's cube: turns against worked positions and known orders, counts of positions as published, shortest solutions."""

import functools
from collections import Counter, deque

import pytest

from nanoragen.envs.rubiks_cube import SOLVED, TURNS, RubiksCube, _near_solved, turned


def after(*actions, stickers=SOLVED):
    return functools.reduce(turned, actions, stickers)


def order(*actions):
    """How often a sequence is repeated until the cube is solved again."""
    stickers, n = after(*actions), 1
    while stickers != SOLVED:
        stickers, n = after(*actions, stickers=stickers), n + 1
    return n


@pytest.mark.parametrize(
    "turn, want",
    [  # worked out by hand with a cube: faces U, L, F, R, B, D
        ("R", "WGWG OOOO GYGY RRRR WBWB YBYB"),
        ("U", "WWWW GGOO RRGG BBRR OOBB YYYY"),
        ("F", "WWOO OYOY GGGG WRWR BBBB RRYY"),
    ],
)
def test_quarter_turns(turn, want):
    assert after(turn) == want.replace(" ", "")
    assert after(turn, turn) == after(turn + "2") and after(turn + "2", turn) == after(turn + "'")
    assert order(turn) == order(turn + "'") == 4 and order(turn + "2") == 2


def test_orders_of_known_sequences():
    assert order("R", "U", "R'", "U'") == 6 and order("R", "U") == 15
    assert order("R2", "U2") == 3  # on a 3x3 three times exchanges two pairs of edges, and leaves all corners in place


def test_every_turn_keeps_the_stickers_and_the_fixed_corner():
    for action, source in TURNS.items():
        assert sorted(source) == list(range(24)), action
        assert all(source[i] == i for i in (4 + 2, 16 + 3, 20 + 2))  # back, bottom, left: of the faces L, B, D


def test_positions_at_each_distance():
    """1, 9, 54, 321, 1847, 9992: the published counts of the pocket cube in the half-turn metric."""
    counts = Counter(_near_solved().values())
    assert [counts[d] for d in range(6)] == [1, 9, 54, 321, 1847, 9992]


def plain_distance(stickers):
    """Turns to the solved position by a search from here alone."""
    queue, seen = deque([(stickers, 0)]), {stickers}
    while queue:
        s, d = queue.popleft()
        if s == SOLVED:
            return d
        for a in TURNS:
            if (to := turned(s, a)) not in seen:
                seen.add(to)
                queue.append((to, d + 1))


def test_best_actions_are_all_that_come_nearer():
    env = RubiksCube(scramble=4)
    for seed in range(4):
        env.reset(seed=seed)
        here = plain_distance(env.stickers)
        assert env.best_actions() == [a for a in env.actions if plain_distance(turned(env.stickers, a)) == here - 1]


@pytest.mark.parametrize("depth", [6, 7])
def test_meeting_in_the_middle_gives_shortest_solutions(depth):
    """Beyond the listed positions: best turns lead to where the listed part, or again the search, needs one turn less."""
    env = RubiksCube(scramble=depth)
    for seed in range(30):
        env.reset(seed=seed)
        start, lengths = env.stickers, set()
        for pick in (0, -1):
            env.stickers, n = start, 0
            while best := env.best_actions():
                env.step(best[pick])
                n += 1
            lengths.add(n)
        assert env.stickers == SOLVED and len(lengths) == 1 and n <= depth
        assert n > 5 or _near_solved()[start] == n


def test_any_position_is_solved_in_eleven_turns():
    env = RubiksCube(scramble=20)
    for seed in range(25):
        env.reset(seed=seed)
        assert len([env.step(a) for a in env.demonstrate()]) <= 11 == env.max_turns and env.stickers == SOLVED


@pytest.mark.parametrize("scramble", [1, 2, 3, 20])
def test_scrambles_are_never_solved(scramble):
    env, seen = RubiksCube(scramble), set()
    for seed in range(300):
        env.reset(seed=seed)
        assert env.stickers != SOLVED
        seen.add(env.stickers)
    assert len(seen) > {1: 8, 2: 50, 3: 150, 20: 295}[scramble]


def test_reward_spelling_and_rendering():
    env = RubiksCube()
    env.reset(seed=0)
    env.stickers = after("R", "U'")
    assert env.render().split("\n")[0] == f"U {env.stickers[:2]}/{env.stickers[2:4]}" and len(env.render().split("\n")) == 6
    text, reward, terminated, _, info = env.step(" u ")
    assert (reward, terminated, info["success"], info["action_is_effective"]) == (0.0, False, False, True)
    text, reward, terminated, _, info = env.step("r’")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert text == "U WW/WW\nL OO/OO\nF GG/GG\nR RR/RR\nB BB/BB\nD YY/YY"
    _, reward, terminated, _, info = env.step("R")  # over: nothing turns any more
    assert (reward, terminated, info["success"], info["action_is_valid"]) == (0.0, True, True, False)


@pytest.mark.parametrize("action", ["D", "L", "B", "R3", "RU", "R U", "2R", "R''", "", "'", "Right", "R2 or U"])
def test_other_turns_do_nothing(action):
    env = RubiksCube()
    env.reset(seed=1)
    before = env.stickers
    _, reward, _, _, info = env.step(action)
    assert env.stickers == before and reward == 0.0 and not info["action_is_valid"]


@pytest.mark.parametrize("scramble", [0, 21, 2.5, "3", None])
def test_impossible_options(scramble):
    with pytest.raises(ValueError, match="^scramble: .*valid: 1 to 20"):
        RubiksCube(scramble=scramble)
