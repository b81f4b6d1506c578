"""WebShop: the pages, and the actions.

Left out: the reward (test_webshop_reward.py), and where products and goals come from (test_webshop_catalogue.py).
"""

import itertools
import random
import re
import sys

import numpy as np
import pytest

pytest.importorskip("bm25s")

from test_webshop_reward import fits

from nanoragen.envs.base import EVAL_SEEDS, TRAIN_SEEDS
from nanoragen.envs.webshop import WebShop
from nanoragen.envs.webshop_catalogue import EVERY

# -- playing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"products": 50}, {"products": 200, "per_page": 2}, {"catalogue_seed": 9}])
def test_solver(options):
    env = WebShop(**options)
    won = 0
    for seed in [*range(60), *range(TRAIN_SEEDS.start, TRAIN_SEEDS.start + 60)]:
        env.reset(seed=seed)
        results = [env.step(a) for a in itertools.islice(env.demonstrate(), env.max_turns)]
        won += results[-1][4]["success"]
        assert all(r[4]["action_is_valid"] and r[4]["action_is_effective"] for r in results)
    assert won >= 0.95 * 120


def test_solver_finds_back_from_anywhere():
    env, rng = WebShop(products=100, per_page=5), random.Random(0)
    for seed in range(60):
        env.reset(seed=seed)
        for _ in range(rng.randrange(8)):
            actions = [f"click[{b}]" for b in env.buttons() if b != "buy now"] or ["search[wool hair lamp]"]
            env.step(rng.choice(actions))
        done = [env.step(a) for a in itertools.islice(env.demonstrate(), 40)]
        assert done[-1][4]["success"]


def test_success_is_a_reward_of_one_and_nothing_less():
    env, seen = WebShop(products=60), set()
    for seed in range(40):
        for skip in (0, 1):  # with all options, and with one left out
            env.reset(seed=seed)
            actions = []
            while best := env.best_actions():
                drop = skip and env.page == "item" and best != ["click[Buy Now]"] and len(actions) == 2
                actions.append("click[Buy Now]" if drop and len(best) == 1 else best[0])
                _, reward, over, _, info = env.step(actions[-1])
            assert over and info["success"] == (reward == 1.0)
            seen.add(reward)
    assert 1.0 in seen and min(seen) < 1.0


def test_buying_pays_once():
    env = WebShop(products=60)
    env.reset(seed=1)
    for action in env.demonstrate():
        reward = env.step(action)[1]
    assert reward == 1.0
    for action in ("click[Buy Now]", "search[lamp]", "click[Back to Search]"):
        _, reward, over, _, info = env.step(action)
        assert (reward, over, info["success"], info["action_is_valid"]) == (0.0, True, True, False)


def test_random_actions_are_valid_and_seldom_win():
    env, rng, won = WebShop(), np.random.default_rng(0), 0
    for seed in range(100):
        env.reset(seed=seed)
        for _ in range(env.max_turns):
            _, _, over, _, info = env.step(env.random_action(rng))
            assert info["action_is_valid"]
            if over:
                break
        won += info["success"]
    assert won < 30


def at(page, **options):
    """The shop, with seed 0, on the page of results or of the product asked for."""
    env = WebShop(products=100, **options)
    env.reset(seed=0)
    actions = env.demonstrate()
    for _ in range({"search": 0, "results": 1, "item": 2}[page]):
        env.step(next(actions))
    return env


@pytest.mark.parametrize(
    "page, action",
    [
        ("search", "search[boots]"),
        ("search", "Search[ BOOTS ]"),
        ("search", " search [boots] \n"),
        ("search", "search[[boots]]"),
        ("search", "search[zzz]"),
        ("results", "click[Back to Search]"),
        ("results", "CLICK[ back  to search ]"),
        ("results", "click[Next >]"),
        ("item", "click[< Prev]"),
        ("item", "click[Description]"),
        ("item", "click[features]"),
        ("item", "click[Buy Now]"),
    ],
)
def test_actions_that_are_understood(page, action):
    env = at(page, per_page=3)
    before = env.render()
    text, _, _, _, info = env.step(action)
    assert info["action_is_valid"] and info["action_is_effective"] and text != before


@pytest.mark.parametrize(
    "page, action",
    [
        ("search", "search"),
        ("search", "search[]"),
        ("search", "search[ ]"),
        ("search", "search boots"),
        ("search", "search[boots"),
        ("search", "searchboots]"),
        ("search", "search(boots)"),
        ("search", "buy[boots]"),
        ("search", "click[Search]"),
        ("search", "click[Buy Now]"),
        ("search", "search[a] click[b]]["),
        ("results", "search[boots]"),  # the box is on the search page
        ("results", "click[Buy Now]"),
        ("results", "click[< Prev]"),  # the first page
        ("results", "click[B99999]"),
        ("results", "click[Page 1]"),
        ("item", "click[Next >]"),
        ("item", "click[color]"),
        ("item", "click[Price]"),
        ("item", "click[Rating: N.A.]"),
        ("item", "click[Instruction:]"),
        ("item", "click[chartreuse]"),
    ],
)
def test_actions_that_are_not(page, action):
    env = at(page, per_page=3)
    before = env.render()
    text, reward, over, _, info = env.step(action)
    assert text == before and reward == 0.0 and not over
    assert not info["action_is_valid"] and not info["action_is_effective"]


def test_only_what_the_page_shows_can_be_clicked():
    env = at("results", per_page=3)
    shown, hidden = env.results[:3], env.results[3:]
    assert not env.step(f"click[{env.catalogue.products[hidden[0]].id}]")[4]["action_is_valid"]
    assert env.step("click[Next >]")[4]["action_is_valid"]
    assert not env.step(f"click[{env.catalogue.products[shown[0]].id}]")[4]["action_is_valid"]
    assert env.step(f"click[{env.catalogue.products[hidden[0]].id.lower()}]")[4]["action_is_valid"]
    assert env.step("click[< Prev]")[0].count("Page 2") == 1


def test_options_are_kept_on_the_sub_pages_and_lost_on_leaving():
    env = at("item")
    value = env.goal.options[0][1]
    assert env.step(f"click[{value.upper()}]")[4]["action_is_effective"]
    assert not env.step(f"click[{value}]")[4]["action_is_effective"]  # chosen already
    for action in ("click[Features]", "click[< Prev]", "click[Description]", "click[< Prev]"):
        env.step(action)
    assert value in env.chosen.values()
    env.step("click[< Prev]")
    env.step(f"click[{env.catalogue.products[env.goal.product].id}]")
    assert env.chosen == {}


def test_a_search_that_finds_nothing_shows_an_empty_page():
    env = at("search")
    text = env.step("search[zzz qqq]")[0]
    assert text.endswith("Back to Search [SEP] Page 1 (Total results: 0)") and env.buttons() == ["back to search"]


def test_thousand_fuzzed_actions_never_raise_nor_win_unfairly():
    env, rng, over, bought = WebShop(products=100), random.Random(1), True, 0
    pieces = ["search[", "click[", "]", "[", "Buy Now", "< Prev", "Next >", "Back to Search", "B00001", "color", "\x00", "||", "é"]
    for i in range(1_000):
        if over:
            env.reset(seed=i)
        noise = "".join(rng.choice(pieces) for _ in range(rng.randrange(6)))
        action = noise if rng.random() < 0.5 else env.random_action(np.random.default_rng(i))
        before = env.page
        text, reward, over, truncated, info = env.step(action)
        assert env.observation_space.contains(text) and 0.0 <= reward <= 1.0 and not truncated
        assert over == (env.page == "done")
        if over and before != "done":
            wanted, product = (env.catalogue.products[n] for n in (env.goal.product, env.item))
            assert info["success"] == fits(product, env.chosen, env.goal, wanted, env.limit)
            bought += 1
    assert bought > 5


# -- instances ---------------------------------------------------------------------------------------------------------


def test_what_evaluation_asks_for_is_never_trained_on():
    env = WebShop(products=100)
    asked = {}
    for seeds in (EVAL_SEEDS, TRAIN_SEEDS):
        for seed in seeds[:300]:
            env.reset(seed=seed)
            asked.setdefault(seeds, set()).add(env.goal.product)
    assert asked[EVAL_SEEDS] == set(range(0, 100, EVERY)) and not asked[TRAIN_SEEDS] & asked[EVAL_SEEDS]


def test_the_limit_is_one_that_the_product_keeps():
    env = WebShop()
    for seed in range(200):
        text, _ = env.reset(seed=seed)
        price = env.catalogue.products[env.goal.product].price
        assert price < env.limit <= price + 40 and env.limit % 10 == 0
        assert f"price lower than {env.limit:.2f} dollars" in text
        assert all(a in text for a in env.goal.attributes) and all(f"{k}: {v}" in text for k, v in env.goal.options)


@pytest.mark.parametrize(
    "key, options",
    [
        ("products", {"products": 9}),
        ("products", {"products": 10_001}),
        ("products", {"products": "many"}),
        ("per_page", {"per_page": 0}),
        ("per_page", {"per_page": 11}),
        ("catalogue_seed", {"catalogue_seed": -1}),
        ("catalogue_seed", {"catalogue_seed": 0.5}),
        ("data", {"data": "nowhere.json"}),
    ],
)
def test_impossible_options(key, options):
    with pytest.raises(ValueError, match=f"^{key}: .*valid: ") as error:
        WebShop(**options)
    assert "\n" not in str(error.value)


def test_without_bm25s_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'nanoragen[envs]'")) as error:
        WebShop(products=13, catalogue_seed=77)
    assert "\n" not in str(error.value) and "valid: " in str(error.value)
