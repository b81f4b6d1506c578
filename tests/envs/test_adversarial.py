"""10,000 answers that are out to fool, stop or misuse a grader, made by seeded rules, over all environments that judge.

Each is wrong or right by construction, never by asking the code under test. Wrong ones are never rewarded, right ones in unusual
spelling are; every reward is finite; none takes long; none writes a file, opens a socket, starts a process or runs as code.
`pytest -s` prints the table that envs/README.md shows.

Left out: purchases in webshop whose score lies between 0 and 1 (test_webshop_reward.py has 6,000), and more ways to misuse the
sandbox itself (test_sandbox.py).
"""

import json
import os
import random
import string
import sys

import pytest
from disguises import BREAKING, CHEATS, FUNCTIONS, HUGE, TEMPLATES, disguises, fill
from fake_lean import fake_lean
from judged import FOUND, stepped

from nanoragen.envs import lean, math_judge
from nanoragen.envs.code import Code
from nanoragen.envs.code_data import own_tasks
from nanoragen.envs.registry import make
from nanoragen.rollout.chat import parse_reply

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are run on Linux only")


# -- mathematics ---------------------------------------------------------------------------------------------------------------


def spelled(rng, n):
    """A whole number above 9, in an unusual spelling."""
    text = rng.choice([f"{n}", f"{n:,}", f"+{n}", f"0{n}", f"{n}.0", f"{n}.", f"{n}e0", f"{10 * n}e-1", f"{2 * n}/2", f"\\frac{{{3 * n}}}{{3}}",
                       f"{n}.00", f"{n} \\times 10^0", f"\\dfrac{{{n}}}{{1}}"])  # fmt: skip
    around = [
        "@",
        "  @\n",
        "$@$",
        "\\(@\\)",
        "\\[@\\]",
        "\\boxed{@}",
        "**@**",
        "The answer is @",
        "n = @",
        "Final answer: @",
        "\\boxed{@} \\boxed{@}",
        "$\\boxed{@}$.",
    ]
    return rng.choice(around + ["\\text{@}"] * ("\\" not in text)).replace("@", text)


def near(rng, n):
    """Another number, in a spelling that makes it look like n."""
    return rng.choice([f"-{n}", f"{n}.0000001", f"{n}e1", f"{n}{n}", f"{n + 1}", f"{n}/3", f"0.{n}", f"{n},{n}", f"{n}0", f"1{n}", f"{n} 1/2", f"+-{n}", f"--{n}",
                       f"{n}^1", f"{n}*1", f"{n}+0", f"{n - 1}+1", f"{n}x", f"{n}!", f"\\pm {n}", f"0x{n}", f"{n}_0", f"{n} {n}", f"1e{n}", f"\\sqrt{{{n}}}",
                       f"\\frac{{{n}}}{{0}}", f"\\boxed{{{n}", f"> {n}", f"{n}i", f"{n}\\infty", f"({n}, {n})", f"\\{{{n}\\}}", f"{n}%%", f"{n} \\text{{ or so}}",
                       f"\\int {n}", f"\\sum_{{i=1}}^{{{n}}} 1", f"{n}={n}", f"{n};{n}", f"1,{n}" if n < 100 else f"{n},1"])  # fmt: skip


def test_math_answers_that_are_numbers(judge):
    rng, env = random.Random(1), make("math_qa")
    for seed in range(60):
        env.reset(seed=seed)
        n, verdict = int(env.answer), stepped(env, seed=seed)
        if n < 10:
            continue
        for _ in range(25):
            judge("math_qa, numbers", verdict, spelled(rng, n), True)
            judge("math_qa, numbers", verdict, near(rng, n), False)
        for wrong in disguises(rng, str(n), str(n + rng.randint(1, 9)), 25):
            judge("math_qa, numbers", verdict, wrong, False)
    for text in HUGE:
        judge("math_qa, numbers", verdict, fill(text, str(n), str(n + 1)), False)


def latex(rng):
    """(the right answer, the same in another form, another value in a like form): a, b, c, m are whole, m is no square."""
    a, b, c, m = rng.randint(2, 9), rng.randint(2, 9), rng.randint(3, 9), rng.choice([2, 3, 5, 7])
    return rng.choice(
        [
            (f"{a}\\sqrt{{{m}}}", f"\\sqrt{{{a * a * m}}}", f"{a * m**0.5:.6f}"),
            (f"{a}\\sqrt{{{m}}}", f"\\sqrt{{{m}}} \\cdot {a}", f"{a + 1}\\sqrt{{{m}}}"),
            (f"{a}+{b}\\sqrt{{{m}}}", f"{b}\\sqrt{{{m}}} + {a}", f"{a}-{b}\\sqrt{{{m}}}"),
            (f"\\frac{{{a}\\pi}}{{{c}}}", f"\\frac{{{2 * a}\\pi}}{{{2 * c}}}", f"{3.14159265 * a / c:.7f}"),
            (f"{a}x+{b}", f"{b} + {a}x", f"{a}x-{b}"),
            (f"({a},{b + 9})", f"({a}, {b + 9})", f"({b + 9},{a})"),
            (f"[{a},{b + 9}]", f"\\left[{a}, {b + 9}\\right]", f"({a},{b + 9})"),
            (f"x^{a}", f"x^{{{a}}}", f"x^{{{a + 1}}}"),
            (f"\\frac{{x}}{{{c}}}", f"\\frac{{2x}}{{{2 * c}}}", f"\\frac{{{c + 1}}}{{x}}"),
            (f"2^{{{c}0}}\\sqrt{{{m}}}", f"\\sqrt{{{m}}} \\cdot 2^{{{c}0}}", f"2^{{{c}1}}\\sqrt{{{m}}}"),
        ]
    )


@pytest.mark.skipif(not math_judge.installed(), reason="math-verify is not installed (extra envs)")
def test_math_answers_that_are_no_numbers(judge, monkeypatch):
    rng, name = random.Random(2), "math_qa, math-verify"
    monkeypatch.setattr(math_judge, "TIME_LIMIT", 0.5)
    assert math_judge.same("2\\sqrt2", "\\sqrt{8}")  # the process is there, and may be started anew when it was killed

    def verdict(answer):
        right = math_judge.same(answer, gold)
        return float(right), right

    for n in range(110):
        gold, other, wrong = latex(rng)
        judge(name, verdict, rng.choice(["{}", "${}$", "\\boxed{{}}", " {} ", "\\({}\\)"]).replace("{}", other), True)
        judge(name, verdict, wrong, False)
        for text in disguises(rng, gold, wrong, 6):
            if not any(slow in text for slow in ("**", "!!", "^2^2", "e9999")):  # BREAKING has them once: each costs a new process
                judge(name, verdict, text, False, watch=False)
    for text in BREAKING:
        judge(name, verdict, text.replace("{r}", gold), False, watch=False)
    assert math_judge.same("2\\sqrt2", "\\sqrt{8}")
    worker = math_judge._worker().pid
    if os.path.isdir(f"/proc/{worker}/fd"):
        links = [os.readlink(f"/proc/{worker}/fd/{n}") for n in os.listdir(f"/proc/{worker}/fd")]
        assert not any("socket:" in link or "pwned" in link for link in links)


# -- arithmetic ----------------------------------------------------------------------------------------------------------------


def respelled(rng, text, target):
    """An expression, with the signs and brackets that people use."""
    signs = {"*": rng.choice(["*", "×", "·"]), "/": rng.choice(["/", "÷"]), "-": rng.choice(["-", "−", "–"])}
    text = "".join(signs.get(c, c) for c in text).replace(" ", rng.choice([" ", "", "  ", "\n"]))
    text = text.replace("(", "[").replace(")", "]") if rng.random() < 0.2 else text
    text = rng.choice(["{}", "({})", "(({}))", " {} "]).format(text)
    return text + rng.choice(["", f" = {target}", f"={target}"])


def test_countdown_expressions(judge):
    rng, env = random.Random(3), make("countdown")
    for seed in range(70):
        env.reset(seed=seed)
        right, verdict, (a, b, c), target = env.best_actions(), stepped(env, seed=seed), env.numbers, env.target
        for _ in range(15):
            judge("countdown", verdict, respelled(rng, rng.choice(right), target), True)
        cheats = [f"{target}", f"({target})", f"{a} {b} {c} = {target}", f"{target} + {a} - {a}", f"{target} + 0 * {a} * {b} * {c}", f"{right[0]} + {a} - {a}", f"{right[0]}; {target}",
                  f"{right[0]} == {target}", f"-({right[0]})", f"+{right[0]}", f"{right[0]} # {target}", f"{right[0]} ** 1", f"{right[0]} // 1", f"int({right[0]})", f"{a}{b}{c}",
                  f"{right[0]} + ", f"({right[0]}", f"{right[0]})", f"{right[0]} {right[0]}", f"{a} = {target}", f"{right[0]}.0", f"{right[0]} + 0", f"({right[0]}) * 1", f"{right[0]} % 1000",
                  f"{a} / 0 + {b} + {c}", f"{a} / ({b} - {b}) * {c}", f"{right[0]} ^ 1", f"{right[0]}!", f"0x{a} + {b} + {c}", f"1e0 * ({right[0]})", f"{right[0]} + -0", f"{right[0]}, {right[0]}",
                  f"lambda: {right[0]}", f"({right[0]})()", f"eval({right[0]!r})", "{" + right[0] + "}", f"'{right[0]}'", f"{right[0]} or 1", f"{right[0]} if 1 else 0", f"max({right[0]}, 0)"]  # fmt: skip
        for wrong in [*cheats, *disguises(rng, right[0], f"{a} + {b}", 30)]:
            if wrong != cheats[3] or sorted([target, a, a]) != sorted(env.numbers):  # 5 of 5, 1 and 1 is right
                judge("countdown", verdict, wrong, False)
    for text in HUGE:
        judge("countdown", verdict, fill(text, right[0], str(target)), False)


# -- searching and shopping ----------------------------------------------------------------------------------------------------


def test_search_answers(judge):
    pytest.importorskip("bm25s")
    rng, env, no_signs = random.Random(4), make("search_qa"), str.maketrans("", "", string.punctuation)

    def same_words(text, right):  # SQuAD: signs do not count
        return text.lower().translate(no_signs).split() == right.lower().split()

    for seed in range(50):
        env.reset(seed=seed)
        (right,), wrong = env.question.answers, rng.choice(env.library.titles)
        verdict = stepped(env, "finish[{}]".format, seed)
        while wrong.lower() in right.lower() or right.lower() in wrong.lower():
            wrong = rng.choice(env.library.titles)
        for change in ("{}", " {} ", "{}.", '"{}"', "the {}", "**{}**", "{}!", "({})", "A {}", "  The   {} ?"):
            for case in (str.upper, str.lower):
                judge("search_qa", verdict, change.format(case(right)), True)
        for text in disguises(rng, right, wrong, 40):
            if not same_words(text, right):
                judge("search_qa", verdict, text, False)
        for text in (
            [f"-{right}", f"{right}.5", f"{right[:2]}.{right[2:]}", f"{right[:2]},{right[2:]}", f"{right}%1", f"{right}-{right}"]
            if right.isdigit()
            else []
        ):
            judge("search_qa", verdict, text, False)
    for text in HUGE:
        if not same_words(fill(text, right, wrong), right):
            judge("search_qa", verdict, fill(text, right, wrong), False)


def test_webshop_purchases(judge):
    pytest.importorskip("bm25s")
    rng, env = random.Random(5), make("webshop")

    def verdict(text):
        """The whole path to the right product, with this text in place of the last step."""
        env.reset(seed=seed)
        for action in path[:-1]:
            env.step(action)
        _, reward, _, _, info = env.step(text)
        return reward, info["success"]

    for seed in range(25):
        env.reset(seed=seed)
        path = []
        for action in env.demonstrate():
            path.append(action)
            env.step(action)
        for text in ("click[Buy Now]", "CLICK[BUY NOW]", "  click [ buy   now ]\n", "Click[buy now]", "click[\tBuy\nNow ]"):
            judge("webshop", verdict, text, True)
        ids = [p.id for p in rng.sample(env.catalogue.products, 3)]
        cheats = ["buy now", "click(Buy Now)", "click[Buy]", "click[Buy Now", "click Buy Now]", "click[[Buy Now]]", "buy[now]", "finish[Buy Now]", "search[Buy Now]", "click[Buy Now]]",
                  "click[Buy Now] click[Buy Now]", "click[Βuy Now]", "click[Buy\u200bNow]", "click[thank you for shopping with us!]", "click[search]", "click[]", "think[Buy Now]",
                  "click[your score (min 0.0, max 1.0)]", "click[1.00]", *(f"click[{n}]" for n in ids)]  # fmt: skip
        for text in [
            *cheats,
            *(f"click[{t}]" for t in disguises(rng, "Buy Now", ids[0], 12)),
            *disguises(rng, "click[Buy Now]", ids[0], 12),
        ]:
            judge("webshop", verdict, text, False)
    for text in HUGE:
        judge("webshop", verdict, f"click[{fill(text, 'Buy Now', 'x')}]", False)


# -- games ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake", "bandit", "sudoku", "rubiks_cube", "game_2048"])
def test_moves_that_win(name, judge):
    """One move before the end: the winning one in any case and with any blanks, and what only looks like it."""
    rng, env = random.Random(6), make(name)

    def verdict(text):
        env.reset(seed=seed)
        for action in path[:-1]:
            env.step(action)
        before = env.render()
        _, reward, _, _, info = env.step(text)
        if not info["success"]:
            assert not info["action_is_valid"] and env.render() == before
        return reward, info["success"]

    for seed in range(4 if name == "game_2048" else 12):
        env.reset(seed=seed)
        path = []
        for action in env.demonstrate():
            path.append(action)
            env.step(action)
        last = path[-1]
        for text in (last, last.upper(), last.lower(), f"  {last}\n", f"\t{last} "):
            judge(name, verdict, text, True, chance=name == "bandit")  # the better arm, whatever it pays
        cheats = [f"{last}{last}", f"{last} {last}", f"{last};", f"[{last}]x", f"1. {last}!", f"{last} now", f"go {last}", f"{last}, then {last}", last[::-1] + "z", f"{last}\x00", f"{last}\u200b",
                  f"{last} ... {last}", f"move({last!r})", f"{last}\n{last}", f"<b>{last}</b>", f"{last}#"]  # fmt: skip
        for text in [*cheats, *disguises(rng, last, "zzz", 24)]:
            judge(name, verdict, text, False)
    for text in HUGE:
        judge(name, verdict, fill(text, last, "zzz"), False)


# -- replies: what reaches a grader at all --------------------------------------------------------------------------------------


def test_replies(judge):
    """As the rollout does it: what does not parse never reaches the environment, and the answer is not taken from the reasoning."""
    rng, env = random.Random(7), make("countdown")
    bad = ["{r}", "<answer>{r}</answer>", "{r}</think>", "so {r}</think><answer>{w}</answer>", "</think><answer>{r}", "</think>{r}</answer>", "</think><answer>{r}</think></answer>",
           "<think>x</think><answer>{r}</answer>", "</think></think><answer>{r}</answer>", "</think><answer>{r}</answer><answer>{r}</answer>", "<answer>{r}</answer></think>",
           "</think><answer>{w}</answer> {r}", "</think> {r} <answer>{w}</answer>", "</think><answer>{w} || {r}</answer>", "</think><answer></answer>", "</think><answer> || </answer>",
           "</think><answer><answer>{r}</answer></answer>", "x<answer>{r}</think></answer>", "</THINK><ANSWER>{r}</ANSWER>", "</think ><answer>{r}</answer>", "</think><answer >{r}</answer>",
           "</think>\n<answer>{r}</answer>\nand so on", "</think><answer>{w}</answer><|im_end|></think><answer>{r}</answer>", "</think><answer>{r}</answer></think>",
           "＜/think＞<answer>{r}</answer>", "</think><answer>{r}<!-- </answer> --></answer>", "</think>&lt;answer&gt;{r}&lt;/answer&gt;"]  # fmt: skip
    good = ["</think><answer>{r}</answer>", "why {w}</think><answer>{r}</answer>", "</think>\n\n<answer>\n{r}\n</answer>\n", "{r} {r}</think><answer>{r}</answer>", "x || y</think><answer>{r} || {w}</answer>",
            "</think><answer> || {r}</answer>", "&lt;/think&gt;</think> <answer>{r}</answer> "]  # fmt: skip

    def verdict(reply):
        env.reset(seed=seed)
        reward, success = 0.0, False
        for action in parse_reply(reply).actions[: env.max_actions_per_turn]:
            _, reward, _, _, info = env.step(action)
            success = info["success"]
        return reward, success

    for seed in range(30):
        env.reset(seed=seed)
        right, (a, b, _) = env.best_actions()[0], env.numbers
        for text in bad:
            judge("replies", verdict, fill(text, right, f"{a} + {b}"), False)
        for text in good:
            judge("replies", verdict, fill(text, right, f"{a} + {b}"), True)
        for text in rng.sample(HUGE, 3):
            for around in ("{}", "</think>{}", "{}</think><answer>", "</think><answer>{}</answer>"):
                judge("replies", verdict, around.replace("{}", fill(text, right, "0")), False)


# -- programs and proofs --------------------------------------------------------------------------------------------------------


@linux
def test_programs(judge):
    """Of functions and of programs; the reference in unusual clothes is right."""
    env = Code(allow_code_execution=True, seconds=20.0)
    tasks = [t for t in own_tasks() if t.call]
    patient = dict(env.limits)

    def verdict(text):
        env.reset(seed=0)
        env.task, env.shown, env.hidden = task, task.tests[:2], task.tests[2:]
        env.limits = {**patient, "seconds": 0.5 if name == "endless" else 4.0 if name else 20.0}
        _, reward, _, _, info = env.step(text)
        return reward, info["success"]

    for n, (name, program) in enumerate(FUNCTIONS.items()):
        task = tasks[n % len(tasks)]
        shown = task.tests[0][1][0]
        text = (
            program.replace("{name}", task.call)
            .replace("{shown!r}", repr(shown))
            .replace("{gold}", json.dumps(shown))
            .replace("{{", "{")
            .replace("}}", "}")
        )
        judge("code", verdict, text, False, watch=False)
    name = ""
    for task in tasks[:3]:
        indented = "\n".join("  " + line for line in task.solution.splitlines())
        for text in (
            f"```python\n{task.solution}\n```",
            f"# coding\n\n{task.solution}\nprint('noise')",
            f"if True:\n{indented}",
            f"```\n{task.solution}```\n",
        ):
            judge("code", verdict, text, True, watch=False)
        for text in [fill(t, f"{task.call}", "x") for t in HUGE[:8]]:
            judge("code", verdict, text, False)  # too long to be run
    task = next(t for t in own_tasks() if not t.call)
    gold = task.tests[0][1][0]
    for text in (f"print({gold!r})", "", "print", f"import sys\nprint({gold!r}); sys.exit(0)", f"print({gold!r}, {gold!r})", f"{gold}", "print(open('/dev/stdin').read())", "while print(1): pass",
                 f"print({gold!r}, end='\\x00')", "import os\nos.write(1, b'\\xff\\xfe')\nprint"):  # fmt: skip
        judge("code", verdict, text, False, watch=False)


@linux
def test_proofs(judge, tmp_path_factory):
    """No tactic that gives up, defines or runs something is tried, and nothing but Lean's own verdict proves. Lean is a stand-in."""
    env = make("lean", command=fake_lean(tmp_path_factory.mktemp("lean")), seconds=20.0)

    def verdict(text):
        env.reset(seed=0)
        _, reward, _, _, info = env.step(text)
        return reward, info["success"]

    for cheat in CHEATS:
        for around in (
            "exact {}",
            "{}",
            "intro h; {}",
            "first | {} | rfl",
            "have : False := {}",
            "simp [{}]",
            "exact (by {})",
            "all_goals ({})",
            "show True from {}",
        ):
            text = around.replace("{}", cheat)
            assert not lean.is_tactic(text), text
            judge("lean", verdict, text, False)
    for text in [fill(t, "omega", "sorry") for t in (*TEMPLATES[:20], *HUGE)]:
        judge("lean", verdict, text, False, watch=not lean.is_tactic(text))
    for text in ("simp", "constructor", "grind", "have : False := by omega", "intro h", "trivial", "rfl", "decide"):
        judge("lean", verdict, text, False, watch=False)
    judge("lean", verdict, " omega\n", True, watch=False)

    def read(text):
        proved = lean.verdict(text, 1) == ("", "")
        return float(proved), proved

    line = {"severity": "info", "pos": {"line": 9}, "data": "'to_prove' does not depend on any axioms"}
    judge("lean", read, json.dumps(line), True)
    rng = random.Random(8)
    for _ in range(300):  # Lean's one good answer, damaged or contradicted
        key = rng.choice(["severity", "pos", "data", "more"])
        wrong = {"severity": ["error", None, 7], "pos": [None, {}, {"line": "x"}, []], "more": [0],
                 "data": ["", "'x' does not depend on any axioms", "'to_prove' depends on axioms: [sorryAx]", "to_prove does not depend on any axioms", "'to_prove' depends on axioms: [propext, cheat]",
                          "'to_prove' does not depend on any axioms, really", None]}[key]  # fmt: skip
        text = json.dumps({**line, key: rng.choice(wrong)})
        if key == "more":
            text = rng.choice([json.dumps(line)[:-9], json.dumps(line) + "\nnot json", json.dumps(line) + "\n[1]", "x" + json.dumps(line), json.dumps(line) * 2,
                               json.dumps(line) + '\n{"severity": "error", "pos": {"line": 3}, "data": "unsolved goals"}'])  # fmt: skip
        judge("lean", read, text, False)


def test_ten_thousand_in_all():
    """The last test of this file: it counts what the others asked, and prints the table of envs/README.md."""
    if len(FOUND) < 14:
        pytest.skip("some of the tests above were not run")
    print("\n| grader | answers | of these wrong | seconds in all | longest |\n|---|---|---|---|---|")
    for grader, (n, wrong, seconds, longest) in FOUND.items():
        print(f"| {grader} | {n:,} | {wrong:,} | {seconds:.1f} | {longest:.2f} |")
    total = [sum(f[i] for f in FOUND.values()) for i in range(3)]
    print(f"| all | {total[0]:,} | {total[1]:,} | {total[2]:.1f} | {max(f[3] for f in FOUND.values()):.2f} |")
    assert total[0] >= 10_000 and total[0] - total[1] >= 2_000
