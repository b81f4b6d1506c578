"""Noisy demonstrations of the bundled games, with their reasoning in words: what the bundled model was trained on (warmup.py).

Reinforcement learning needs three things from such a start:

- **Room to improve, and variance inside a group.** Demonstrators know good moves and err: at the rate PLAN_NOISE a turn's plan is
  random, at the rate HAND_NOISE the plan is good and the answer is random. So the model knows more than it plays.
- **Reasoning that depends on the input.** It is made from the state ("the box is 1 down 2 left of me"), and in relative positions,
  which a small model can act on.
- **Reasoning with entropy.** Every sentence has many phrasings. With one, H(Z|X) would start at 0.

The bundled model was made from exactly these sentences and this order of random draws.
Left out: demonstrations that correct their own mistakes in the same reply.
"""

import copy
import re
from fractions import Fraction

import numpy as np

from nanoragen.envs.countdown import join
from nanoragen.envs.registry import make
from nanoragen.envs.sudoku import PLACES

# Chosen so that demonstrators win 51 to 79% of their episodes.
PLAN_NOISE = {"sokoban": 0.10, "frozen_lake": 0.15, "bandit": 0.15, "countdown": 0.15, "sudoku": 0.15, "webshop": 0.08}
HAND_NOISE = {"sokoban": 0.45, "frozen_lake": 0.50, "bandit": 0.40, "countdown": 0.30, "sudoku": 0.30, "webshop": 0.12}
OPTIONS = {"webshop": {"products": 100, "per_page": 3}}  # a small shop
SHOPS = range(1, 41)  # catalogue seeds: with many of them the model has to read, not remember. The game itself has seed 0


def say(rng, text: str) -> str:
    """One phrasing of a text with alternatives in braces: "{so|then} go" -> "so go" or "then go"."""
    return re.sub(r"\{([^{}]*)\}", lambda m: str(rng.choice(m[1].split("|"))), text)


def offset(rows: int, columns: int) -> str:
    """A displacement in words: (2, -1) -> "2 down 1 left"."""
    parts = [f"{abs(rows)} {'down' if rows > 0 else 'up'}"] if rows else []
    parts += [f"{abs(columns)} {'right' if columns > 0 else 'left'}"] if columns else []
    return " ".join(parts) or "right there"


def think_sokoban(env, plan, rng) -> str:
    def place(cell):
        return np.array(divmod(cell, env.width))

    me = place(env.player)
    box = min(sorted(env.boxes - env.targets) or sorted(env.boxes), key=lambda b: abs(place(b) - me).sum())
    target = min(sorted(env.targets - env.boxes) or sorted(env.targets), key=lambda t: abs(place(t) - place(box)).sum())
    seen = f"{{the box|box|my box}} {{is|lies|sits}} {offset(*place(box) - me)}{{,|;|.}} "
    seen += f"{{the target|target|its target|goal}} {{is|lies|sits}} {offset(*place(target) - me)}{{,|;|.}} "
    return say(rng, seen) + go(plan, rng)


def think_frozen_lake(env, plan, rng) -> str:
    row, column = divmod(env.position, env.size)
    ahead = offset(env.size - 1 - row, env.size - 1 - column)
    holes = env.render().rsplit("beside you ", 1)[1]
    danger = "{no hole near|safe here|all ice}" if holes == "none" else "{hole|a hole|water|danger} " + holes
    return say(rng, f"{{the goal|goal|my goal|G}} {{is|lies|sits}} {ahead}{{,|;|.}} {danger}{{,|;|.}} ") + go(plan, rng)


def think_bandit(env, plan, rng) -> str:
    best, other = env.better.lower(), next(a for a in env.actions if a != env.better).lower()
    finer, poorer = "{is worth more|is finer|is better|is richer}", "{is poorer|is worse|is cheaper}"
    claim = rng.choice([f"{best} {finer} than {other}", f"{other} {poorer} than {best}"])
    start, end = "{I think|it seems|surely|clearly}", "{so|then|now|hence} {I pull|pull|I take|take}"
    return say(rng, f"{start} {claim}{{,|;|.}} {end} {plan[0].lower()}")


def think_sudoku(env, plan, rng) -> str:
    """What each cell sees, in the order of the grid: "1 4: row 4 3 1, column 3, box 1 4, so 2"."""
    env, thoughts = copy.copy(env), []
    for action in plan:
        row, column, digit = map(int, action.split())
        places = PLACES[env.size]
        mine = places[(row - 1) * env.size + column - 1]
        seen = [" ".join(str(d) for d, its in zip(env.cells, places) if d and its[unit] == mine[unit]) for unit in range(3)]
        end = f"{{so|then|hence}} {digit}" if digit else "{so clear|wrong|must go}"
        thoughts.append(say(rng, f"{{|at |cell }}{row} {column}: row {seen[0]}, column {seen[1]}, box {seen[2]}, {end}"))
        env.step(action)
    return say(rng, "{; |. |, and }").join(thoughts)


def think_webshop(env, plan, rng) -> str:
    goal, wanted, what = env.goal, env._wanted(), plan[0].partition("[")[2].rstrip("]").lower()
    if env.page == "search":
        need = f"{{I want|I need|look for|find}} {wanted.kind}{{,|;| that is}} {', '.join(goal.attributes)}"
        return say(rng, f"{need}{{,|;|.}} {{so|then|now}} {{I search|search}}")
    if env.page == "results":
        fits = [a for a in goal.attributes if a in wanted.name.lower()] or [wanted.kind]
        seen = f"{what} {{is|looks|says}} {', '.join(fits)}" if what == wanted.id.lower() else "{none fits|not here|not one}"
        need = f"{{I want|it must be|looking for}} {', '.join(goal.attributes)}"
        return say(rng, f"{need}{{,|;|.}} {seen}{{,|;|.}} {{so|then|now}} {what}")
    left = [b[len("click[") : -1] for b in env.best_actions()]
    if env.page != "item":
        state = "{I have read it|enough read|that is known}"
    elif left == ["Buy Now"]:
        state = "{all is chosen|nothing is left|that is all}"
    elif left == ["< Prev"]:
        state = "{not this one|the wrong one|it does not fit}"
    else:
        state = f"{{still to choose|left|missing}} {', '.join(left)}"
    return say(rng, f"{state}{{,|;|.}} {{so|then|now}} {{I click|click|take}} {what}")


def think_countdown(env, plan, rng) -> str:
    """The plan evaluated from its innermost brackets: "I need 19; 8 + 6 is 14, 5 + 14 is 19, right"."""
    text, steps = f"({plan[0]})", []
    while text.startswith("("):
        inner = re.search(r"\(([^()]+)\)", text)
        left, op, right = inner[1].split(" ")
        value = join((Fraction(left), ""), op, (Fraction(right), ""))[0]
        steps.append(say(rng, f"{inner[1]} {{is|gives|makes}} {value}"))
        text = text.replace(inner[0], str(value), 1)
    verdict = "{right|good|that is it|done}" if value == env.target else "{not it|wrong|no|off}"
    need = f"{{I need|need|target|the target is}} {env.target}{{,|;|.}} {{try|take|use|say}}"
    return say(rng, f"{need} {', '.join(steps)}{{,|;|.}} {verdict}")


def go(plan, rng) -> str:
    """The end of a thought: the moves it came to."""
    return say(rng, "{so|then|now|hence} {I go|go|I move|move|walk} ") + say(rng, " {then|and|and then} ").join(plan).lower()


THINK = {
    "sokoban": think_sokoban, "frozen_lake": think_frozen_lake, "bandit": think_bandit,
    "countdown": think_countdown, "sudoku": think_sudoku, "webshop": think_webshop,
}  # fmt: skip


def demonstration(name: str, env, seed: int, rng):
    """One noisy episode: (turns, success), turns = [(observation, reply)], reply = "reasoning</think><answer>a || b</answer>"."""
    observation, _ = env.reset(seed=seed)
    turns, success = [], False
    for _ in range(env.max_turns):
        plan = good_plan(env, rng)
        if not plan or rng.random() < PLAN_NOISE[name]:
            plan = random_plan(env, rng)
        reasoning = THINK[name](env, plan, rng)
        actions = random_plan(env, rng) if rng.random() < HAND_NOISE[name] else plan
        turns.append((observation, f"{reasoning}</think><answer>{' || '.join(actions)}</answer>"))
        for action in actions:
            observation, _, terminated, truncated, info = env.step(action)
            success = info["success"]
            if terminated or truncated:
                return turns, success
    return turns, success


def games(name: str) -> list:
    """The environments of that name, of which demonstrations are drawn evenly."""
    options = OPTIONS.get(name, {})
    return [make(name, catalogue_seed=shop, **options) for shop in SHOPS] if name == "webshop" else [make(name, **options)]


def random_plan(env, rng) -> list[str]:
    """Any valid actions."""
    count = rng.integers(1, env.max_actions_per_turn + 1)
    return [env.random_action(rng) for _ in range(count)]


def good_plan(env, rng) -> list[str]:
    """Up to a turn's worth of good actions, played out on a copy."""
    env, plan = copy.copy(env), []
    for _ in range(env.max_actions_per_turn):
        best = env.best_actions()
        if not best:
            break
        plan.append(str(rng.choice(best)))
        if env.step(plan[-1])[2]:
            break
    return plan
