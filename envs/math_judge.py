r"""Is an answer the right one? `same("\frac{2}{3}", "2/3")`. Numbers exactly, by our own reading; the rest by math-verify.

Where the right answer is a plain number, the answer must be one too, and both are compared as fractions. math-verify is not
asked then: it takes 2 2/3 for 4/3, 41 = 42 for 42, 1/3 for 0.3333333, and a sum that was not worked out for its value. It judges
what is no number (roots, intervals, polynomials, ...), with its tolerance taken away: two numbers must be exactly equal.

It runs in a process of its own that a timer kills after TIME_LIMIT seconds, that may write no file, open no socket and start no
process, and has MEMORY_LIMIT bytes, so no answer hangs, fills the memory or leaves anything behind. Needs the extra `envs`, and a
Unix (timers, resource limits).
What is a guess rather than an answer ("42 or 43", the question again, x > 41) is wrong without being asked about.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from fractions import Fraction

MAX_LENGTH = 200  # characters of an answer
TIME_LIMIT = 3.0  # seconds of processor time, so that a busy machine makes no answer wrong
MEMORY_LIMIT = 4 << 30

# A number, in the spellings that people and models use. Groups of three digits or none, never another grouping.
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
PLAIN = re.compile(rf"({WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:(?:e|(?:\*|\\times|\\cdot|x)10\^)\{{?([+-]?[0-9]{{1,2}})\}}?)?")
MIXED = re.compile(rf"(?:({WHOLE}) )?({WHOLE})/({WHOLE})")
FRACTION = re.compile(r"\\[dt]?frac ?(?:\{ ?([^{} ]+) ?\}|([0-9])) ?(?:\{ ?([^{} ]+) ?\}|([0-9]))")
SPELLINGS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*"})
WRAPPERS = re.compile(
    r"\$\$?(.*?)\$?\$|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|\\(?:text|textbf|mathrm|mbox|mathbf)\{([^{}]*)\}"
    r"|(?:the )?(?:final )?answer(?: is)?:? (.*)|[a-z] ?(?:=|\\in(?![a-z])) ?([^=]*)|#### ?(.*)|\{([^{},]*)\}",
    re.DOTALL | re.IGNORECASE,
)
UNIT = re.compile(r"(.*[0-9}]) ?(?:\\(?:text|mbox|mathrm)\{ ?([^{}]*)\}(\^\{?[0-9]\}?)?|\^\{?\\circ\}?|°)", re.DOTALL)
PROGRAM = (  # what is written as in a program, as LaTeX
    (re.compile(r"\*\* ?(?:\(([^()]*)\)|(-?[0-9]+|[a-zA-Z]))"), lambda m: f"^{{{m[1] or m[2]}}}"),
    (re.compile(r"(?<![\\a-zA-Z])sqrt ?\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
)
REPEATING = re.compile(r"([0-9]+)\.([0-9]*)\\overline\{([0-9]+)\}")
WORD = r"[a-zA-Z](?:\.?[a-zA-Z])+"  # a.m. is one
PAIRED = re.compile(r"(?:\\left)?[(\[]")
GUESSES = re.compile(r"[<>≤≥≠±≈$]|(?<!\\)\\[()\[\]]|\\(?:leq?|geq?|neq?|pm|mp|approx|sim|lt|gt)(?![a-z])|\?")


def same(answer: str, gold: str) -> bool:
    """Whether an answer means the same as the right one, `gold`. Any text is answered; wrong is the default."""
    if len(answer) > MAX_LENGTH:
        return False
    boxes = boxed(answer)
    if boxes:  # everything that is put in a box must be right
        return all(same(b, gold) for b in boxes)
    answer, gold = unwrap(answer), unwrap(gold)
    if not answer:
        return False
    if "," in gold and not PAIRED.match(gold):  # several values
        answer = re.sub(r",? and ", ", ", answer)
    if _closed_up(answer) == _closed_up(gold):
        return True
    if gold.isalpha() and len(gold) > 1:  # a word
        return answer.lower() == gold.lower()
    value, unit = _value_and_unit(gold)
    if value is not None:
        return _same_number(without_unit(answer, unit), gold, value)
    if _bases(answer) != _bases(gold) or (number(answer) is None and not _one_claim(answer, gold)):
        return False
    for written, latex in PROGRAM:
        answer, gold = written.sub(latex, answer), written.sub(latex, gold)
    return ask(answer, gold)


def _bases(text: str) -> set[str]:
    """The bases of numbers in a text, which math-verify does not read: 2516_8 -> 8."""
    return set(re.findall(r"(?<=[0-9A-F])_\{?([0-9]+)", text))


def _closed_up(text: str) -> str:
    """A text without white space, but where that divides two digits: 1 1/2 is not 11/2."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text.strip())


def number(text: str) -> Fraction | None:
    r"""The exact value of a plain number: 1,234  -7  .5  2/3  2 2/3  \frac{2}{3}  4.2e3; $ and % are dropped. Else None."""
    if len(text) > MAX_LENGTH:  # taking off wrappers one by one would take forever
        return None
    text = unwrap(text).translate(SPELLINGS)
    text = FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", text.replace("{,}", ",").replace("\\!", "").replace("\\,", ""))
    text = re.sub(r"^([+-]?) ?\\?\$ ?", r"\1", re.sub(r" ?\\?%$", "", text.strip()))
    sign, text = (-1 if text[:1] == "-" else 1), re.sub(r"^[+-] ?", "", text).strip().lower()
    if match := PLAIN.fullmatch(re.sub(r" ?(\*|\\times|\\cdot|x) ?10\^", r"\g<1>10^", text)):
        mantissa = Fraction(match[1].replace(",", "").rstrip("."))
        return sign * mantissa * Fraction(10) ** int(match[2] or 0)
    if match := REPEATING.fullmatch(text):
        whole, once, again = match.groups()
        return sign * (Fraction(f"{whole}.{once}0") + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once)))
    if match := MIXED.fullmatch(text):
        whole, over, under = (int((g or "0").replace(",", "")) for g in match.groups())
        if under and (match[1] is None or over < under):  # a mixed number's fraction is a proper one
            return sign * (whole + Fraction(over, under))
    return None


def unwrap(text: str) -> str:
    r"""An answer without what is put around it: $ $, \( \), bold, \text{}, \boxed{}, ( ), "the answer is", "x =", a full stop."""
    before = None
    while text != before:
        before, text = text, text.strip()
        text = text.removesuffix(".") if not text.endswith("..") else text
        if (boxes := boxed(text)) and text.startswith("\\boxed") and len(boxes) == 1 and text.endswith("}"):
            text = boxes[0]
        elif match := WRAPPERS.fullmatch(text):
            text = next(g for g in match.groups() if g is not None)
        elif re.fullmatch(r"\(\s*-?[0-9.,/]*[0-9]\s*\)", text) and not re.search(r",(?![0-9]{3}(?![0-9]))", text):
            text = text[1:-1]
    return text


def boxed(text: str) -> list[str]:
    r"""What stands in each \boxed{...}, nested braces counted. A box that is never closed holds nothing."""
    found, at = [], 0
    while (start := text.find("\\boxed{", at)) >= 0:
        depth, at = 1, start + len("\\boxed{")
        begin = at
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
            at += 1
        found.append(text[begin : at - 1] if not depth else "")
    return found


def without_unit(answer: str, unit: str) -> str:
    """An answer without the unit that the right answer has, whether written as text or not."""
    value, own = _split_unit(answer)
    if own == unit:
        return value
    return answer.removesuffix(unit) if unit else answer


def _split_unit(text: str) -> tuple[str, str]:
    match = UNIT.fullmatch(text)
    return (match[1], (match[2] or "").strip() + (match[3] or "") or "°") if match else (text, "")


def _value_and_unit(gold: str):
    value, unit = _split_unit(gold)
    return number(value), unit


def _same_number(answer: str, gold: str, value: Fraction) -> bool:
    given = number(answer)
    if given is None:
        return False
    # 42% is 42 where a percentage is asked for, and 0.42 otherwise; a whole number of things is no percentage
    share = 0 <= value <= 1 or value.denominator > 1
    percents = [t.rstrip().endswith("%") for t in (answer, gold)]
    return (
        given == value
        or (percents == [True, False] and share and given == 100 * value)
        or (percents == [False, True] and 100 * given == value)
    )


def _one_claim(answer: str, gold: str) -> bool:
    """Whether an answer states one thing, of the kind that `gold` is: no words, no second side, no range, no other order."""
    words = set(re.findall(rf"(?<![\\a-zA-Z]){WORD}", re.sub(r"\\[a-zA-Z]+", " ", answer)))
    known = set(re.findall(WORD, gold)) | {"pi", "sqrt", "sin", "cos", "tan", "log", "ln", "infty", "inf"}
    if not words <= known or ("=" in answer) > ("=" in gold):
        return False
    if set(GUESSES.findall(answer)) - set(GUESSES.findall(gold)):
        return False
    if answer.count("'") != gold.count("'"):  # math-verify does not read them
        return False
    return not (PAIRED.match(gold) and "," in gold) or bool(PAIRED.match(answer))


# -- math-verify, in its own process -----------------------------------------------------------------------------------


def installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def ask(answer: str, gold: str) -> bool:
    """math-verify's verdict; False where it takes longer than TIME_LIMIT or cannot read the answer."""
    worker = _worker()
    worker.stdin.write(json.dumps([answer, gold, TIME_LIMIT]) + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:  # it was killed, by its timer or by its memory limit
        worker.wait()
        _worker.cache_clear()
    return line == "true\n"


@functools.cache
def _worker() -> subprocess.Popen:
    """The running process: started on first use, ends when this one does."""
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from nanoragen.envs.math_judge import serve; serve()"
    worker = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    if worker.stdout.readline() != "ready\n":
        raise ValueError("math_qa: math-verify does not start; valid: pip install 'nanoragen[envs]'")
    return worker


def serve():
    """The other process: a line [answer, gold, seconds] in, a line true or false out."""
    import logging
    import resource
    import signal

    from math_verify import parse, verify

    def judge(answer, gold):
        given, right = (parse(f"${t}$", parsing_timeout=None) for t in (answer, gold))
        return bool(verify(right, given, timeout_seconds=None)) and _exact(right[0], given[0])

    logging.disable()  # math-verify warns that its own time limits are off: the timer stands in for them
    judge("\\sqrt{2}", "\\sqrt{8}")  # whatever is imported late is imported now
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    sys.dont_write_bytecode = True
    sys.addaudithook(refuse)
    print("ready", flush=True)
    for line in sys.stdin:
        answer, gold, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its default action ends the process, whatever it is in
        try:
            verdict = judge(answer, gold)
        except Exception:  # whatever a parser makes of a text that was written to break it
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


def refuse(event: str, args):
    """An audit hook. PermissionError for what a judge has no use for, should a parser ever be led to it."""
    begins = ("socket.", "subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork")
    if event.startswith(begins) or (event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        raise PermissionError(f"{event} in the judge of mathematics")


def _exact(right, given) -> bool:
    """math-verify rounds to six places; two real numbers must be equal without it."""
    import sympy

    if not all(isinstance(e, sympy.Expr) and e.is_number for e in (right, given)):
        return True
    difference = sympy.nsimplify(right, rational=True) - sympy.nsimplify(given, rational=True)
    return sympy.simplify(difference) == 0
